"""`testbed.device` on a virtual clock: the whole lab in one process, and no waiting.

What is modelled: compute charged by FLOPs, one processor a device; a link's rate, delay and loss, framing
(`testbed.network.framing`), retransmission and reconnection; every fault. What is not: TCP's slow start and congestion
window, connection set-up, and the time that a device's own software takes for a message.
"""

from testbed.simulation.run import simulate

__all__ = ["simulate"]
