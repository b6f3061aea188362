"""Ports on which agents and the shaper listen inside their containers."""

CONTROL_PORT = 8700
"""HTTP port for the controller, on every agent's loopback interface and on the shaper."""
DATA_PORT = 8701
"""Messages between devices, over TCP."""
CAST_PORT = 8702
"""Broadcasts, over UDP."""
