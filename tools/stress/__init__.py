"""Random scenarios under random faults, each held against what must be true of any run."""
