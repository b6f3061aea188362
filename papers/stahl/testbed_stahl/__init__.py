"""Fully distributed inference (Stahl et al.)."""
