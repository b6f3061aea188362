"""What no run can beat: each processor and each link needs its time for what it did, however well all is overlapped."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from math import inf

import numpy as np

from testbed.experiment import Experiment
from testbed.trace.events import Event
from testbed.trace.intervals import Interval, clip, length
from testbed.trace.log import EventLog
from testbed.wire.framing import wire_bytes


def busiest(events: Sequence[Event], experiment: Experiment, window: Interval) -> float:
    """Return the seconds for which the busiest processor or link had to work on what was done within a window.

    A link, and a device's access to the network, carries bytes / rate, at the rates of the scenario; what arrived
    within the window counts. Channels that several devices share are left out.
    """
    computing: dict[str, array[float]] = defaultdict(lambda: array("d"))
    carried: dict[tuple[str, ...], float] = defaultdict(float)
    access = {spec.name: (spec.uplink or inf, spec.downlink or inf) for spec in experiment.devices}
    log = EventLog.made_of(events)
    for device, start, duration in log.of("compute").rows("device", "start", "duration"):
        computing[device].extend((start, start + duration))
    for device, peer, content, cast in log.of("receive").within(*window).rows("device", "peer", "bytes", "cast"):
        if not cast:
            size, link = 8 * wire_bytes(content), experiment.links.get((peer, device))
            carried["link", peer, device] += size / link.rate if link is not None and link.rate else 0.0
            carried["up", peer] += size / access[peer][0]
            carried["down", device] += size / access[device][1]
    processors = (
        length(clip(np.frombuffer(computing[spec.name]).reshape(-1, 2), *window)) / spec.processors
        for spec in experiment.devices
    )
    return max([0.0, *processors, *carried.values()])
