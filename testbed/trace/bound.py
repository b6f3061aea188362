"""What no run can beat: each processor and each link needs its time for what it did, however well all is overlapped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf

from testbed.experiment import Experiment
from testbed.trace.events import Event
from testbed.trace.intervals import Interval, clip
from testbed.wire.framing import wire_bytes


def busiest(events: Sequence[Event], experiment: Experiment, window: Interval) -> float:
    """Return the seconds for which the busiest processor or link had to work on what was done within a window.

    A link, and a device's access to the network, carries bytes / rate, at the rates of the scenario; what arrived
    within the window counts. Channels that several devices share are left out.
    """
    computing: dict[str, list[Interval]] = defaultdict(list)
    carried: dict[tuple[str, ...], float] = defaultdict(float)
    access = {spec.name: (spec.uplink or inf, spec.downlink or inf) for spec in experiment.devices}
    for event in events:
        fields = event.fields
        if event.event == "compute":
            computing[event.device].append((fields["start"], fields["start"] + fields["duration"]))
        elif event.event == "receive" and window[0] < event.time <= window[1] and not fields.get("cast"):
            size, peer = 8 * wire_bytes(fields["bytes"]), fields["peer"]
            link = experiment.links.get((peer, event.device))
            carried["link", peer, event.device] += size / link.rate if link is not None and link.rate else 0.0
            carried["up", peer] += size / access[peer][0]
            carried["down", event.device] += size / access[event.device][1]
    processors = (
        sum(end - start for start, end in clip(computing[spec.name], *window)) / spec.processors
        for spec in experiment.devices
    )
    return max([0.0, *processors, *carried.values()])
