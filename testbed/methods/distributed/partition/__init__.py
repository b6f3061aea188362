"""Fully distributed inference (Stahl et al.): which device computes which part of which layer; all of it pure."""
