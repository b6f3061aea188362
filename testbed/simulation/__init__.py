"""`testbed.device` on a virtual clock: the whole lab in one process, and no waiting."""

from testbed.simulation.run import simulate

__all__ = ["simulate"]
