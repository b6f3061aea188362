"""Network traffic, in total and by link."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import compress, repeat
from statistics import median
from typing import Any

from testbed.network.link import Link, Pair
from testbed.trace.devices import devices
from testbed.trace.metrics_spec import Metric
from testbed.trace.record import RunView
from testbed.wire.framing import cast_wire_bytes, wire_bytes


def _sum_of_links(key: str, record: RunView) -> int:
    return sum(row[key] for row in record.cached(devices).values())


def _reception_ratio(record: RunView) -> float | None:
    meant = sum(len(peers) for (peers,) in record.of("cast").rows("peers"))
    heard = sum(record.cached(_count_heard).values())
    return heard / meant if meant else None


def _count_heard(record: RunView) -> Counter[Pair]:
    """Return the number of received casts by directed pair of devices."""
    heard: Counter[Pair] = Counter()
    received = record.of("receive")
    for _, (peers, own, casts) in received.columns("peer", "device", "cast"):
        is_cast = (cast is not None for cast in casts)
        heard.update(compress(zip(peers, own, strict=False), is_cast))
    return heard


def _cast_time(record: RunView) -> float | None:
    durations = [duration for (duration,) in record.of("cast").rows("duration")]
    return median(durations) if durations else None


METRICS = (
    Metric(
        "casts",
        "number",
        "broadcasts of all devices",
        lambda record: len(record.of("cast")) or None,
    ),
    Metric(
        "cast_time",
        "seconds",
        "median transmission time of a broadcast",
        _cast_time,
    ),
    Metric(
        "reception",
        "share",
        "share of broadcasts received, counted for each receiver",
        _reception_ratio,
    ),
    Metric(
        "messages",
        "number",
        "messages sent by all devices; a broadcast counts once",
        lambda record: _sum_of_links("messages_sent", record),
    ),
    Metric(
        "bytes_sent",
        "bytes",
        "bytes sent by all devices; a broadcast counts once",
        lambda record: _sum_of_links("bytes_sent", record),
        compared=True,
    ),
    Metric(
        "wire_bytes",
        "bytes",
        (
            "bytes sent by all devices as counted by their kernels, including "
            "headers, acknowledgements and retransmissions; in containers"
        ),
        lambda record: sum(record.outcome.fidelity.get("sent", {}).values()) or None,
        compared=True,
    ),
    Metric(
        "bytes_received",
        "bytes",
        "bytes received by all devices",
        lambda record: _sum_of_links("bytes_received", record),
    ),
)


@dataclass(slots=True)
class LinkUse:
    """Traffic on a directed link."""

    messages: int = 0
    bytes: int = 0
    wire_bytes: float = 0.0
    """Bytes with all headers."""
    casts: int = 0

    def add(self, number: int, content: int, *, is_cast: bool) -> None:
        """Count a number of equal messages of so many bytes."""
        framed = cast_wire_bytes(content) if is_cast else wire_bytes(content)
        self.messages += number
        self.bytes += number * content
        self.wire_bytes += number * framed
        self.casts += number if is_cast else 0


def _link_uses(record: RunView) -> dict[Pair, LinkUse]:
    """Return the traffic of each used directed link, in the order of first use."""
    # A run sends millions of messages and few kinds of them: equal ones are counted first.
    alike: Counter[tuple[str, str, tuple[str, ...], int]] = Counter()
    sent = record.events.of("send", "cast")
    for event, (own, peer, peers, sizes) in sent.columns(
        "device", "peer", "peers", "bytes"
    ):
        # A tuple for each message: its one receiver, or all receivers of a broadcast.
        receivers_of: Iterable[tuple[str, ...]] = zip(peer, strict=False)
        if event == "cast":
            receivers_of = (tuple(names or ()) for names in peers)
        contents = (size or 0 for size in sizes)
        alike.update(zip(repeat(event), own, receivers_of, contents, strict=False))
    uses: defaultdict[Pair, LinkUse] = defaultdict(LinkUse)
    for (event, device, receivers, content), number in alike.items():
        for receiver in receivers:
            uses[device, receiver].add(number, content, is_cast=event == "cast")
    return uses


def links(record: RunView) -> list[dict[str, Any]]:
    """Return one row per used or measured directed link, in the order of the experiment."""
    uses, heard = _link_uses(record), record.cached(_count_heard)
    known, bounded = record.experiment.links, record.experiment.bounded_links()
    measured = {(item.source, item.destination): item for item in record.outcome.links}
    # Cached, since most of a thousand links have the same properties.
    as_dict = cache(lambda link: link and asdict(link))
    rows = []
    for pair in dict.fromkeys([*known, *uses]):
        if pair not in uses and pair not in measured:
            continue
        use = uses.get(pair, LinkUse())
        measurement = measured.get(pair)
        requested = measurement.requested if measurement else known.get(pair)
        rows.append(
            {
                "source": pair[0],
                "destination": pair[1],
                "messages": use.messages,
                "bytes": use.bytes,
                "casts": use.casts,
                "casts_heard": heard[pair],
                "requested": as_dict(requested),
                "rate_at_best": bounded[pair].rate if pair in bounded else None,
                "measured": measurement.measured() if measurement else None,
                "problem": measurement.problem if measurement else None,
                "used_share": _utilisation(requested, use.wire_bytes, record.end),
            }
        )
    return rows


def _utilisation(link: Link | None, wire_bytes: float, end: float) -> float | None:
    """Return the share of the run for which a link transmitted; None for a link without a rate."""
    if link is None or link.rate is None or end <= 0:
        return None
    return link.transmission_time(wire_bytes) / end
