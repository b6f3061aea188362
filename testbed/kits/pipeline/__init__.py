"""Training and inference by stages in a row."""
