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


def _sum_over_devices(key: str, record: RunView) -> int:
    return sum(row[key] for row in record.cached(devices).values())


def _reception_ratio(record: RunView) -> float | None:
    intended = sum(len(peers) for (peers,) in record.of("cast").rows("peers"))
    received = sum(record.cached(_count_received_casts).values())
    return received / intended if intended else None


def _count_received_casts(record: RunView) -> Counter[Pair]:
    """Return the number of received casts by sender and receiver."""
    counts: Counter[Pair] = Counter()
    receptions = record.of("receive")
    for _, (senders, receivers, casts) in receptions.columns("peer", "device", "cast"):
        is_cast = (cast is not None for cast in casts)
        counts.update(compress(zip(senders, receivers, strict=False), is_cast))
    return counts


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
        lambda record: _sum_over_devices("messages_sent", record),
    ),
    Metric(
        "bytes_sent",
        "bytes",
        "bytes sent by all devices; a broadcast counts once",
        lambda record: _sum_over_devices("bytes_sent", record),
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
        lambda record: _sum_over_devices("bytes_received", record),
    ),
)


@dataclass(slots=True)
class LinkUse:
    """Traffic on a directed link; a broadcast counts on the link to each receiver."""

    messages: int = 0
    """Number of messages, casts included."""
    bytes: int = 0
    """Bytes of the messages without headers."""
    wire_bytes: float = 0.0
    """Bytes with all headers."""
    casts: int = 0
    """Number of casts."""

    def add(self, count: int, size: int, *, is_cast: bool) -> None:
        """Add a number of equal messages of ``size`` bytes."""
        size_on_wire = cast_wire_bytes(size) if is_cast else wire_bytes(size)
        self.messages += count
        self.bytes += count * size
        self.wire_bytes += count * size_on_wire
        self.casts += count if is_cast else 0


def _link_uses(record: RunView) -> dict[Pair, LinkUse]:
    """Return the traffic of each used directed link, in the order of first use."""
    # Equal messages are counted first, since a run sends millions of messages of few kinds.
    counts: Counter[tuple[str, str, tuple[str, ...], int]] = Counter()
    sent = record.events.of("send", "cast")
    for event, (senders, peer, peers, sizes) in sent.columns(
        "device", "peer", "peers", "bytes"
    ):
        # A tuple for each message: its one receiver, or all receivers of a broadcast.
        receivers_of: Iterable[tuple[str, ...]] = zip(peer, strict=False)
        if event == "cast":
            receivers_of = (tuple(names or ()) for names in peers)
        plain_sizes = (size or 0 for size in sizes)
        counts.update(
            zip(repeat(event), senders, receivers_of, plain_sizes, strict=False)
        )
    uses: defaultdict[Pair, LinkUse] = defaultdict(LinkUse)
    for (event, sender, receivers, size), count in counts.items():
        for receiver in receivers:
            uses[sender, receiver].add(count, size, is_cast=event == "cast")
    return uses


def links(record: RunView) -> list[dict[str, Any]]:
    """Return one row per used or measured directed link, in the order of the experiment."""
    uses = _link_uses(record)
    received_casts = record.cached(_count_received_casts)
    scenario_links = record.experiment.links
    bounded = record.experiment.bounded_links()
    measured = {(item.source, item.destination): item for item in record.outcome.links}
    # Cached, since most of a thousand links have the same properties.
    as_dict = cache(lambda link: link and asdict(link))
    rows = []
    for pair in dict.fromkeys([*scenario_links, *uses]):
        if pair not in uses and pair not in measured:
            continue
        use = uses.get(pair, LinkUse())
        measurement = measured.get(pair)
        requested = scenario_links.get(pair)
        if measurement is not None:
            requested = measurement.requested
        rows.append(
            {
                "source": pair[0],
                "destination": pair[1],
                "messages": use.messages,
                "bytes": use.bytes,
                "casts": use.casts,
                "casts_heard": received_casts[pair],
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
