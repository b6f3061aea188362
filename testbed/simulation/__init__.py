"""`testbed.device` on a virtual clock: the whole lab in one process, and no waiting.

What is modelled: compute charged by FLOPs, one processor a device, whose speed may change any time; a link's rate and
delay, framing (`testbed.wire.framing`), what chance does to packets (`crossing`), TCP's window on links that lose
packets (`reno`), retransmission and reconnection; uplinks, downlinks and radio cells (`sharing`); messages under way
together (`channel`); every fault; traces. What is not: TCP's slow start on links without loss, queue limits, connection
set-up, packets that arrive twice, and the time that a device's own software takes.
"""

from testbed.simulation.run import simulate

__all__ = ["simulate"]
