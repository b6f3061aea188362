"""Where agents and the shaper listen inside their containers."""

CONTROL_PORT = 8700
"""HTTP of the controller: of every agent, on its loopback, and of the shaper."""
DATA_PORT = 8701
"""Messages between devices."""
CAST_PORT = 8702
"""Casts, over UDP."""
