"""Pure generators: who computes what, in which order."""
