"""The containers, networks and links of a run: made, found again, removed."""
