"""Containers, networks and links of a run: creation, look-up and removal."""
