"""Where agents and the shaper listen inside their containers."""

CONTROL_PORT = 8700
"""HTTP of the controller, on the control network: of every agent and of the shaper."""
DATA_PORT = 8701
"""Messages between devices."""
CAST_PORT = 8702
"""Casts, over UDP."""
