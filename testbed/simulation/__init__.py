"""`testbed.device` on a virtual clock: the whole lab in one process, without waiting.

The model contains computation charged by FLOPs and bytes, at a speed that may change any time; a link's rate and delay,
framing (`testbed.wire.framing`), random loss and delay of packets (`crossing`), TCP's window on links that lose packets
(`reno`), retransmission and reconnection; uplinks, downlinks and radio cells (`sharing`); concurrent messages
(`channel`); every fault; link traces. The model leaves out TCP's slow start on links without loss, queue limits,
connection set-up, duplicated packets, and the time of a device's own software.
"""

from testbed.simulation.run import simulate

__all__ = ["simulate"]
