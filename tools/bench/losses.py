"""Message times over TCP connections and lossy links, measured in bare namespaces and compared with the virtual clock.

    python -m tools.bench.losses reno.json [--algorithm cubic]

Measures unless the file exists, and prints a table. The time of a message ends with the receiver's one-byte answer. The
links and sizes were fixed before the first measurement. The simulated mean is of ten times as many messages.
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
"""Size of messages in bytes -> number of messages."""
MOST_SECONDS = 240.0
"""Time after which no further message of a size is sent."""
LEAST_MESSAGES = 5
"""Minimum number of messages for a result."""
_TCP_NOTSENT_LOWAT = 25
"""Constant of linux/tcp.h, which Python's `socket` lacks."""


def link_groups() -> Iterator[list[Link]]:
    """Yield groups of links that are measured at the same time; both directions of a link are equal."""
    for delay in (0.001, 0.01, 0.05):
        links = []
        for rate, loss in product((10e6, 100e6), (0.001, 0.01, 0.05)):
            links.append(Link(rate, delay, loss=loss))
        yield links
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
    """Times of messages of one size over one link, in seconds."""

    link: Link
    size: int
    seconds: list[float]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"link": self.link.to_json(), "size": self.size, "seconds": self.seconds}


def measure_group(links: Sequence[Link], algorithm: str, seed: int) -> Iterator[Point]:
    """Measure all message sizes over a group of links at the same time."""
    names: list[str] = []
    shaped: dict[Pair, Link] = {}
    for index, link in enumerate(links):
        sender, receiver = f"a{index}", f"b{index}"
        names += [sender, receiver]
        shaped[sender, receiver] = link
        shaped[receiver, sender] = link
    net = Network(names)
    shaping = Shaping("auto", seed=seed)

    def measure(index: int) -> list[tuple[int, list[float]]]:
        return list(_measure_link(net, index, algorithm))

    try:
        shaping.attach(net.endpoints.values(), shaped)
        with ThreadPoolExecutor(len(links)) as pool:
            measured = pool.map(measure, range(len(links)))
            for link, sizes in zip(links, measured, strict=True):
                for size, seconds in sizes:
                    yield Point(link, size, seconds)
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
        # Before the connection: an accepted socket inherits the options of the listening one.
        for end in (listening, sender):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm.encode()
            )
        # As an agent's connections.
        sender.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        with sender, listening, ThreadPoolExecutor(1) as answering:
            answering.submit(_answer_messages, listening, size)
            sender.connect((address, port))
            yield size, list(_time_messages(sender, size, count))
            sender.shutdown(socket.SHUT_WR)


def _time_messages(sender: socket.socket, size: int, count: int) -> Iterator[float]:
    body = bytes(size)
    until = time.monotonic() + MOST_SECONDS
    for _ in range(count):
        began = time.monotonic()
        sender.sendall(body)
        # The answer, after the last byte of the message.
        sender.recv(1)
        yield time.monotonic() - began
        if time.monotonic() > until:
            return


def _answer_messages(listening: socket.socket, size: int) -> None:
    """Answer each message with one byte, until the sender closes the connection."""
    connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        remaining = size
        while True:
            received = len(connection.recv(min(remaining, 1 << 18)))
            if not received:
                return
            remaining -= received
            if not remaining:
                # One byte, so that the answer takes no more than a round trip.
                connection.sendall(b"k")
                remaining = size


def simulate_mean_time(link: Link, size: int, count: int) -> float:
    """Return the mean time of messages over ten simulated connections, each with ``count`` messages, in seconds."""
    assert link.rate
    packets = math.ceil(size / SEGMENT)
    wire_bytes = float(size) + packets * (TCP_HEADERS + ETHERNET_HEADER)
    round_trip = 2 * link.delay
    packet_time = PACKET * 8 / link.rate
    times = []
    for seed in range(10):
        forward = make_crossing(link, f"{seed} there")
        backward = make_crossing(link, f"{seed} back")
        # The window outlives a message, as in a connection that is kept open.
        window = Window()
        for _ in range(count):
            sent_bytes = wire_bytes
            min_seconds = lateness = 0.0
            # A link without losses and jitter has no random crossing.
            if forward is not None and backward is not None:
                sent_bytes, min_seconds, lateness = forward.draw_message(
                    wire_bytes, packet_time, round_trip, window, backward.draw_loss
                )
                lateness += backward.draw_acknowledgement(round_trip)
            # The link or the window limits the message, whichever takes longer.
            transmission = max(sent_bytes * 8 / link.rate, min_seconds)
            times.append(transmission + lateness + round_trip)
    return fmean(times)


def table_lines(points: Sequence[Point]) -> Iterator[str]:
    """Yield the lines of the table: in each cell mean, standard error, and the ratio to the simulated mean."""
    sizes = [*MESSAGES]
    yield "| link | " + " | ".join(f"{size // 1000} kB" for size in sizes) + " |"
    yield "|---" * (1 + len(sizes)) + "|"
    by_link: dict[Link, list[str]] = {}
    for point in points:
        by_link.setdefault(point.link, []).append(_format_point(point))
    for link, cells in by_link.items():
        yield f"| {_describe_link(link)} | {' | '.join(cells)} |"


def _describe_link(link: Link) -> str:
    """Return the properties of a link for the table.

    >>> _describe_link(Link(10e6, 0.05, loss=0.01))
    '10mbit, 50 ms, 1 %'
    """
    name = f"{format_rate(link.rate or 0)}, {1e3 * link.delay:g} ms"
    name += f" ± {1e3 * link.jitter:g} ms" if link.jitter else ""
    if link.bursts is not None:
        return f"{name}, {link.bursts.loss:.1%} in bursts of {1 / link.bursts.r:g}"
    return f"{name}, {100 * link.loss:g} %"


def _format_point(point: Point) -> str:
    count = len(point.seconds)
    if count < LEAST_MESSAGES:
        return "–"
    mean = fmean(point.seconds)
    error = stdev(point.seconds) / math.sqrt(count) / mean
    ratio = mean / simulate_mean_time(point.link, point.size, count)
    return f"{mean:.3g} s ± {error:.0%}: {ratio:.2f}"


def main() -> None:
    """Measure unless the file exists, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--algorithm", default="reno")
    arguments = parser.parse_args()
    points: list[Point] = []
    if arguments.file.exists():
        for entry in json.loads(arguments.file.read_text()):
            link = Link.from_json(entry["link"])
            points.append(Point(link, entry["size"], entry["seconds"]))
    else:
        for number, links in enumerate(link_groups()):
            points += measure_group(links, arguments.algorithm, number)
            # After each group, so that an interruption loses one group only.
            document = [point.to_json() for point in points]
            arguments.file.write_text(json.dumps(document))
    print("\n".join(table_lines(points)))


if __name__ == "__main__":
    main()
