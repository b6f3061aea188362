"""Runs in the shaper container: the backends that shape links, and the probes that measure them."""
