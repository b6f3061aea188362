"""A finished run: written, read, summarised and compared; knows no page."""
