"""What went over the network, in all and link by link."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict
from functools import cache
from itertools import compress, repeat
from statistics import median
from typing import Any

from testbed.network.link import Link, Pair
from testbed.trace.devices import devices
from testbed.trace.figures import Figure
from testbed.trace.record import Record
from testbed.wire.framing import cast_wire_bytes, wire_bytes


def _sum(key: str, record: Record) -> int:
    return sum(row[key] for row in record.cached(devices).values())


def _reception(record: Record) -> float | None:
    meant = sum(sum(map(len, peers)) for _, (peers,) in record.of("cast").columns("peers"))
    heard = sum(record.cached(_heard).values())
    return heard / meant if meant else None


def _heard(record: Record) -> Counter[Pair]:
    """Return how many casts each directed pair of devices carried."""
    heard: Counter[Pair] = Counter()
    for _, (peers, own, casts) in record.of("receive").columns("peer", "device", "cast"):
        heard.update(compress(zip(peers, own, strict=False), (cast is not None for cast in casts)))
    return heard


def _cast_time(record: Record) -> float | None:
    durations = [duration for _, (durations,) in record.of("cast").columns("duration") for duration in durations]
    return median(durations) if durations else None


FIGURES = (
    Figure(
        "casts",
        "number",
        "transmissions to several at once, by all devices together",
        lambda record: len(record.of("cast")) or None,
    ),
    Figure("cast_time", "seconds", "median time that a cast took to leave its device", _cast_time),
    Figure("reception", "share", "of the casts meant to be heard, each counted for each of its peers", _reception),
    Figure(
        "messages",
        "number",
        "sent, by all devices together; a cast counts once",
        lambda record: _sum("messages_sent", record),
    ),
    Figure(
        "bytes_sent",
        "bytes",
        "by all devices together; a cast counts once",
        lambda record: _sum("bytes_sent", record),
        compared=True,
    ),
    Figure(
        "wire_bytes",
        "bytes",
        "that left all devices as their kernels counted them: headers, acknowledgements and repeats too; in containers",
        lambda record: sum(record.outcome.fidelity.get("sent", {}).values()) or None,
        compared=True,
    ),
    Figure("bytes_received", "bytes", "by all devices together", lambda record: _sum("bytes_received", record)),
)


def links(record: Record) -> list[dict[str, Any]]:
    """Return one row per directed link that was used or measured, in the order of the experiment."""
    count: Counter[Pair] = Counter()
    size: Counter[Pair] = Counter()
    carried: defaultdict[Pair, float] = defaultdict(float)
    casts: Counter[Pair] = Counter()
    heard = record.cached(_heard)
    alike: Counter[tuple[str, str, tuple[str, ...], int]] = Counter()
    sent = record.events.of("send", "cast")
    for event, (own, peer, peers, sizes) in sent.columns("device", "peer", "peers", "bytes"):
        meant = zip(peer, strict=False) if event == "send" else (tuple(each or ()) for each in peers)
        alike.update(zip(repeat(event), own, meant, (size or 0 for size in sizes), strict=False))
    for (event, device, receivers, content), number in alike.items():
        framed = cast_wire_bytes(content) if event == "cast" else wire_bytes(content)
        for receiver in receivers:
            count[device, receiver] += number
            size[device, receiver] += number * content
            carried[device, receiver] += number * framed
            casts[device, receiver] += number * (event == "cast")
    known = record.experiment.links
    measured = {(item.source, item.destination): item for item in record.outcome.links}
    bounded = record.experiment.bounded_links()
    order = [pair for pair in known if pair in count or pair in measured]
    order += [pair for pair in count if pair not in known]
    asked = cache(lambda link: link and asdict(link))  # of thousands of links most are asked the same of
    rows = []
    for pair in order:
        found = measured.get(pair)
        requested = found.requested if found else known.get(pair)
        rows.append(
            {
                "source": pair[0],
                "destination": pair[1],
                "messages": count[pair],
                "bytes": size[pair],
                "casts": casts[pair],
                "casts_heard": heard[pair],
                "requested": asked(requested),
                "rate_at_best": bounded[pair].rate if pair in bounded else None,
                "measured": found.figures() if found else None,
                "problem": found.problem if found else None,
                "used_share": _used(requested, carried[pair], record.end),
            }
        )
    return rows


def _used(link: Link | None, wire_bytes: float, end: float) -> float | None:
    if link is None or link.rate is None or end <= 0:
        return None
    return link.transmission_time(wire_bytes) / end
