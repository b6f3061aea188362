"""Fully distributed inference (Stahl et al.): every layer divided over the devices."""
