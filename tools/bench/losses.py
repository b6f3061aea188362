"""Losses: messages over one TCP connection and lossy links, measured in bare namespaces, against the virtual clock.

    python -m tools.bench.losses reno.json [--algorithm cubic]

Measures, unless the file is there, and prints a table. A message counts from its first byte until the byte that answers
it. The links and sizes were fixed before the first measurement. The simulated mean is of ten times as many messages.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from testbed.common.quantities import format_rate
from testbed.network.link import GilbertElliott, Link, Pair
from testbed.simulation.crossing import PACKET, make_crossing
from testbed.simulation.reno import Window
from testbed.wire.framing import ETHERNET_HEADER, SEGMENT, TCP_HEADERS
from testbed_agent.sending import UNSENT_BYTES
from testbed_controller.shaping.shaper import Shaping
from tools.bench.bare import Network

MESSAGES = {1_000: 400, 20_000: 300, 200_000: 60, 2_000_000: 20}
"""Messages of each size in bytes."""
SECONDS = 240.0
"""Time after which no further message of a size is sent."""
LEAST = 5
"""Messages without which a point has no figure."""
_TCP_NOTSENT_LOWAT = 25


def waves() -> Iterator[list[Link]]:
    """Yield the links that are measured at the same time, the same in both directions."""
    for delay in (0.001, 0.01, 0.05):
        yield [
            Link(rate, delay, loss=loss)
            for rate, loss in product((10e6, 100e6), (0.001, 0.01, 0.05))
        ]
    yield [
        Link(50e6, 0.025, loss=0.01),
        Link(50e6, 0.025, jitter=0.004, loss=0.01),
        Link(50e6, 0.025, jitter=0.01, loss=0.01),
        Link(50e6, 0.025, bursts=GilbertElliott(p=0.005, r=0.5)),
        Link(50e6, 0.025, jitter=0.004),
        Link(50e6, 0.025, jitter=0.01),
        Link(50e6, 0.025),
        Link(10e6, 0.025, loss=0.1),
    ]
    yield [
        Link(50e6, 0.025, jitter=0.005),
        Link(50e6, 0.025, jitter=0.0075),
        Link(100e6, 0.005, jitter=0.001),
    ]


@dataclass
class Point:
    """The seconds that messages of one size took over one link."""

    link: Link
    size: int
    seconds: list[float]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"link": self.link.to_json(), "size": self.size, "seconds": self.seconds}


def measure_wave(links: Sequence[Link], algorithm: str, seed: int) -> Iterator[Point]:
    """Measure every size over these links at once."""
    names = [f"{end}{index}" for index in range(len(links)) for end in ("a", "b")]
    net, shaping = Network(names), Shaping("auto", seed=seed)
    wanted: dict[Pair, Link] = {}
    for index, link in enumerate(links):
        wanted |= {(f"a{index}", f"b{index}"): link, (f"b{index}", f"a{index}"): link}
    try:
        shaping.attach(net.endpoints.values(), wanted)
        with ThreadPoolExecutor(len(links)) as pool:
            found = pool.map(
                lambda index: list(_measure_link(net, index, algorithm)),
                range(len(links)),
            )
            for link, sizes in zip(links, found, strict=True):
                yield from (Point(link, size, seconds) for size, seconds in sizes)
    finally:
        shaping.close()
        net.close()


def _measure_link(
    net: Network, index: int, algorithm: str
) -> Iterator[tuple[int, list[float]]]:
    address = net.endpoints[f"b{index}"].address
    for size, count in MESSAGES.items():
        listening = net.inside(f"b{index}", lambda: socket.create_server((address, 0)))
        port = listening.getsockname()[1]
        sender = net.inside(
            f"a{index}", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        )
        for end in (listening, sender):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm.encode()
            )
        sender.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        with sender, listening, ThreadPoolExecutor(1) as answering:
            answering.submit(_answer, listening, size)
            sender.connect((address, port))
            yield size, list(_exchange(sender, size, count))
            sender.shutdown(socket.SHUT_WR)


def _exchange(sender: socket.socket, size: int, count: int) -> Iterator[float]:
    body, until = bytes(size), time.monotonic() + SECONDS
    for _ in range(count):
        began = time.monotonic()
        sender.sendall(body)
        sender.recv(1)
        yield time.monotonic() - began
        if time.monotonic() > until:
            return


def _answer(listening: socket.socket, size: int) -> None:
    connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        left = size
        while got := len(connection.recv(min(left, 1 << 18))):
            left -= got
            if not left:
                connection.sendall(b"k")
                left = size


def simulated(link: Link, size: int, count: int) -> float:
    """Return the mean seconds of ten connections, each of so many messages, on the virtual clock."""
    assert link.rate
    wire = float(size) + math.ceil(size / SEGMENT) * (TCP_HEADERS + ETHERNET_HEADER)
    trip, took = 2 * link.delay, []
    for seed in range(10):
        there, back, window = (
            make_crossing(link, f"{seed} there"),
            make_crossing(link, f"{seed} back"),
            Window(),
        )
        for _ in range(count):
            sent, least, late = wire, 0.0, 0.0
            if there is not None and back is not None:
                course = there.message(
                    wire, PACKET * 8 / link.rate, trip, window, back.lost
                )
                sent, least, late = course[0], course[1], course[2] + back.answer(trip)
            took.append(max(sent * 8 / link.rate, least) + late + trip)
    return fmean(took)


def rows(points: Sequence[Point]) -> Iterator[str]:
    """Yield the lines of the table: in each cell the measured mean, its standard error, its ratio to the clock's."""
    sizes = [*MESSAGES]
    yield "| link | " + " | ".join(f"{size // 1000} kB" for size in sizes) + " |"
    yield "|---" * (1 + len(sizes)) + "|"
    by_link: dict[Link, list[str]] = {}
    for point in points:
        by_link.setdefault(point.link, []).append(_cell(point))
    for link, cells in by_link.items():
        yield f"| {_name(link)} | {' | '.join(cells)} |"


def _name(link: Link) -> str:
    name = f"{format_rate(link.rate or 0)}, {1e3 * link.delay:g} ms"
    name += f" ± {1e3 * link.jitter:g} ms" if link.jitter else ""
    if link.bursts is not None:
        return f"{name}, {link.bursts.loss:.1%} in bursts of {1 / link.bursts.r:g}"
    return f"{name}, {100 * link.loss:g} %"


def _cell(point: Point) -> str:
    if len(point.seconds) < LEAST:
        return "–"
    mean, count = fmean(point.seconds), len(point.seconds)
    error = stdev(point.seconds) / math.sqrt(count) / mean
    return f"{mean:.3g} s ± {error:.0%}: {mean / simulated(point.link, point.size, count):.2f}"


def main() -> None:
    """Measure, unless that was done, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--algorithm", default="reno")
    given = parser.parse_args()
    points: list[Point] = []
    if given.file.exists():
        for each in json.loads(given.file.read_text()):
            points.append(
                Point(Link.from_json(each["link"]), each["size"], each["seconds"])
            )
    else:
        for number, links in enumerate(waves()):
            points += measure_wave(links, given.algorithm, number)
            given.file.write_text(json.dumps([each.to_json() for each in points]))
    print("\n".join(rows(points)))


if __name__ == "__main__":
    main()
