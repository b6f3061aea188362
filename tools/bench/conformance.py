"""Conformance: whether each backend's links do what is asked of them, measured on bare network namespaces.

    python -m tools.bench.conformance --links userspace --json out.json

`measure` is a part of ``python -m tools.bench``: each backend at all points, netem in the virtual machine of
``tests/netem`` where this kernel has none. The tests take the same cases at fewer points. Bounds are those of
`testbed_controller.shaping.tolerance` and, for what is random, the 99 % binomial interval; since one sound
measurement in a hundred lies outside of that, what lies outside of its bounds is measured once more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from testbed.common.errors import HostError
from testbed.network.impairments import expected_loss, loss_chain
from testbed.network.link import GilbertElliott, Link, Pair
from testbed_controller.lab.paths import BUILD, ROOT
from testbed_controller.shaping.backend import LINK_BACKENDS
from testbed_controller.shaping.backends import missing_modules
from testbed_controller.shaping.plan import FRAME
from testbed_controller.shaping.shaper import Shaping
from testbed_controller.shaping.tolerance import (
    RATE_HIGHEST,
    RATE_LOWEST,
    binomial_interval,
    delay_tolerance,
)
from tools.bench.bare import Network
from tools.bench.figure import Measurement
from tools.bench.flows import flows, tcp_rates, udp_rates

RESULTS = BUILD / "conformance"
"""Where `measure` leaves what it found, for the table in the documentation."""
JITTER_FRACTION = 0.1
BURSTS_FRACTION = 0.1
TCP_LOWEST = 0.92
"""Content of TCP, of the rate on the wire: headers alone take 4.4 %."""
CHANGE_SECONDS = 0.05
DELAYS = (0.0005, 0.001, 0.005, 0.02, 0.1, 0.5)
LOSSES = (0.001, 0.01, 0.05, 0.1, 0.3, 0.5)
RATES = (250e3, 1e6, 10e6, 100e6, 1e9)
RATE_DELAYS = (0.0, 0.02, 0.1)
PACKETS = 20_000
_SECONDS_TO_FILL = 0.35
"""Seconds that a train of datagrams lasts at a link's rate."""


_DOWN = Link(up=False)


class NamespaceLab:
    """Namespaces whose links one backend shapes: all down but those that a case needs."""

    def __init__(self, backend: str, devices: int = 6) -> None:
        self.names = [f"d{index}" for index in range(devices)]
        self.shaping = Shaping(backend, seed=1)
        self.backend = str(self.shaping.facts()["backend"])
        self.net = Network(self.names)
        self.pairs = [
            (one, other) for one in self.names for other in self.names if one != other
        ]
        self.shaping.attach(
            self.net.endpoints.values(), dict.fromkeys(self.pairs, _DOWN)
        )

    def __enter__(self) -> NamespaceLab:
        # What is under test is the links, not how busy the machine is.
        self._priority = os.getpriority(os.PRIO_PROCESS, 0)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -10)
        return self

    def __exit__(self, *_: object) -> None:
        os.setpriority(os.PRIO_PROCESS, 0, self._priority)
        self.shaping.close()
        self.net.close()

    @contextlib.contextmanager
    def links(self, wanted: Sequence[Link]) -> Iterator[dict[Pair, Link]]:
        """Have these links for a while, and ways back of the same rates; yield which pair has which link."""
        apart = sorted(self.pairs, key=lambda pair: (self._distance(pair), pair))
        given = dict(zip(apart, wanted, strict=False))
        back = {
            (pair[1], pair[0]): Link(rate=link.rate) for pair, link in given.items()
        }
        assert len(given) == len(wanted)
        assert not given.keys() & back.keys()
        self.shaping.set({**back, **given})
        try:
            yield given
        finally:
            self.shaping.set(dict.fromkeys([*given, *back], _DOWN))

    def _distance(self, pair: Pair) -> int:
        """Order pairs so that the first ones load all devices evenly."""
        one, other = (self.names.index(name) for name in pair)
        return (other - one) % len(self.names)


def settled(case: Callable[[], Iterator[Measurement]]) -> Iterator[Measurement]:
    """Yield a case's figures; those outside of their bounds as found the second time."""
    first = list(case())
    again = (
        {}
        if all(figure.reached for figure in first)
        else {figure.name: figure for figure in case()}
    )
    for figure in first:
        yield (
            figure
            if figure.reached
            else replace(again[figure.name], detail="measured a second time")
        )


def delays(
    lab: NamespaceLab, points: Sequence[float] = DELAYS, packets: int = 200
) -> Iterator[Measurement]:
    """The median of one-way delays, on links of all these delays at once."""
    with lab.links([Link(delay=delay) for delay in points]) as links:
        found = flows(lab.net, list(links), packets, 0.003, linger=max(points) + 0.2)
    for pair, link in links.items():
        bound = delay_tolerance(link.delay) * 1e3
        middle = median(found[pair].delays) * 1e3
        asked = link.delay * 1e3
        yield Measurement(
            f"delay {asked:g} ms: median",
            middle,
            "ms",
            between=(asked - bound, asked + bound),
        )


def jitters(
    lab: NamespaceLab, jitter: float = 0.004, delay: float = 0.02, packets: int = 3000
) -> Iterator[Measurement]:
    """The standard deviation of delays of each distribution, and their correlation where the backend has one."""
    links = [
        Link(delay=delay, jitter=jitter, distribution=each)
        for each in ("normal", "uniform", "pareto")
    ]
    correlated = Link(delay=delay, jitter=jitter, jitter_correlation=0.5)
    if LINK_BACKENDS.find(lab.backend).link_problem(correlated, None) is None:
        links.append(correlated)
    with lab.links(links) as given:
        found = flows(
            lab.net, list(given), packets, 0.001, linger=delay + 8 * jitter + 0.2
        )
    for pair, link in given.items():
        asked = link.jitter * 1e3
        name = f"jitter {asked:g} ms {link.distribution}"
        values = found[pair].delays
        if link.jitter_correlation:
            by_number = [delay for _, delay in sorted(found[pair].arrived)]
            name += f", correlation {link.jitter_correlation:g}"
            yield Measurement(
                f"{name}: correlation", _correlation(by_number), "", between=(0.4, 0.6)
            )
        bounds = (asked * (1 - JITTER_FRACTION), asked * (1 + JITTER_FRACTION))
        yield Measurement(
            f"{name}: deviation", pstdev(values) * 1e3, "ms", between=bounds
        )
        bound = delay_tolerance(link.delay) * 1e3 + 3 * asked / math.sqrt(packets)
        mean = fmean(values) * 1e3
        yield Measurement(
            f"{name}: mean",
            mean,
            "ms",
            between=(delay * 1e3 - bound, delay * 1e3 + bound),
        )


def losses(
    lab: NamespaceLab, points: Sequence[float] = LOSSES, packets: int = PACKETS
) -> Iterator[Measurement]:
    """The packets lost of links of all these losses at once."""
    with lab.links([Link(loss=loss) for loss in points]) as links:
        found = flows(lab.net, list(links), packets, 0.0, read_every=50)
    for pair, link in links.items():
        yield _counted(
            f"loss {100 * link.loss:g} %", found[pair].lost, packets, link.loss
        )


def bursts(lab: NamespaceLab, packets: int = 2 * PACKETS) -> Iterator[Measurement]:
    """Loss and mean burst length of Gilbert-Elliott links, and of one with correlated loss."""
    wanted = [
        Link(bursts=GilbertElliott(p=0.05, r=0.5)),
        Link(bursts=GilbertElliott(p=0.04, r=0.25)),
        Link(loss=0.1, loss_correlation=0.4),
    ]
    with lab.links(wanted) as links:
        found = flows(lab.net, list(links), packets, 0.0, read_every=50)
    for pair, link in links.items():
        states = loss_chain(link)
        assert states is not None
        name = "loss 10 %, correlation 0.4"
        if link.bursts:
            name = f"Gilbert-Elliott p {100 * states.p:g} % r {100 * states.r:g} %"
        fates = found[pair].fates
        share, length = 100 * states.loss, 1 / states.r
        bounds = (1 - BURSTS_FRACTION, 1 + BURSTS_FRACTION)
        lost, mean = (
            100 * sum(fates) / packets,
            fmean(len([*run]) for gone, run in groupby(fates) if gone),
        )
        yield Measurement(
            f"{name}: loss", lost, "%", between=(share * bounds[0], share * bounds[1])
        )
        yield Measurement(
            f"{name}: mean burst",
            mean,
            "packets",
            between=(length * bounds[0], length * bounds[1]),
        )


def alterations(lab: NamespaceLab, packets: int = PACKETS) -> Iterator[Measurement]:
    """Duplication, reordering and corruption, each on a link of its own."""
    wanted = [
        Link(delay=0.005, duplicate=0.05),
        Link(delay=0.005, reorder=0.05),
        Link(delay=0.005, corrupt=0.05),
        Link(delay=0.005, duplicate=0.02, reorder=0.03, corrupt=0.01, loss=0.02),
    ]
    # Large enough that the Ethernet header, whose bits nobody checks, is a small part.
    with lab.links(wanted) as links:
        found = flows(lab.net, list(links), packets, 0.0002, size=1000)
    twice, overtaking, damaged, all_of_it = links
    yield _counted("duplicate 5 %", found[twice].twice, packets, 0.05)
    yield Measurement("duplicate 5 %: lost", found[twice].lost, "packets", 0)
    early = sum(delay < 0.0025 for delay in found[overtaking].delays)
    yield _counted("reorder 5 %", early, packets, 0.05)
    yield _counted("corrupt 5 %", found[damaged].lost, packets, 0.05)
    yield Measurement(
        "corrupt 5 %: seen without checksum",
        found[damaged].damaged,
        "packets",
        1,
        at_most=False,
    )
    yield _counted(
        "2 % lost, 1 % corrupt, 2 % twice",
        found[all_of_it].lost,
        packets,
        _gone(links[all_of_it]),
    )


def _gone(link: Link) -> float:
    """Return the share of datagrams of which no copy arrives intact."""
    lost = expected_loss(link)
    return lost * (1 - link.duplicate) + lost * lost * link.duplicate


def rates(
    lab: NamespaceLab,
    points: Sequence[tuple[float, float]],
    *,
    tcp: bool = True,
    patience: float = 1.0,
) -> Iterator[Measurement]:
    """What UDP and TCP get of links of these (rate, delay): the slow ones together, the fast ones one by one."""
    slow = [Link(rate=rate, delay=delay) for rate, delay in points if rate <= 10e6]
    alone = [[Link(rate=rate, delay=delay)] for rate, delay in points if rate > 10e6]
    for together in ([slow] if slow else []) + alone:
        with lab.links(together) as links:
            yield from _udp(lab, links)
            if tcp:
                yield from _tcp(lab, links, patience)


def _udp(lab: NamespaceLab, links: Mapping[Pair, Link]) -> Iterator[Measurement]:
    slowest = min(link.rate or math.inf for link in links.values())
    seconds = max(_SECONDS_TO_FILL, 60 * FRAME * 8 / slowest)
    found = udp_rates(lab.net, links, seconds, skip=0.1 * seconds)
    for pair, link in links.items():
        yield _share(
            "UDP on the wire",
            link,
            found[pair],
            (100 * RATE_LOWEST, 100 * RATE_HIGHEST),
        )


def _tcp(
    lab: NamespaceLab, links: Mapping[Pair, Link], patience: float
) -> Iterator[Measurement]:
    # A window grows to what the link holds in some ten round trips, and the slower the more there is to fill.
    longest = max(link.delay for link in links.values())
    slowest = min(link.rate or math.inf for link in links.values())
    skip = patience * (0.1 + 30 * longest + 20 * FRAME * 8 / slowest)
    counted = max(0.5, skip, 80 * FRAME * 8 / slowest)
    found = tcp_rates(lab.net, links, skip + counted, skip=skip)
    for pair, link in links.items():
        yield _share("TCP content", link, found[pair], (100 * TCP_LOWEST, 100.0))


def _share(
    what: str, link: Link, rate: float, bounds: tuple[float, float]
) -> Measurement:
    assert link.rate
    name = f"{_bits(link.rate)}, {1e3 * link.delay:g} ms: {what}"
    return Measurement(name, 100 * rate / link.rate, "%", between=bounds)


def _bits(rate: float) -> str:
    for factor, unit in ((1e9, "gbit"), (1e6, "mbit")):
        if rate >= factor:
            return f"{rate / factor:g} {unit}"
    return f"{rate / 1e3:g} kbit"


def many(
    backend: str, pairs: int = 20, rate: float = 20e6, delay: float = 0.02
) -> Iterator[Measurement]:
    """As many pairs at once, full, and half full: rates and delays must hold for all of them."""
    link = Link(rate=rate, delay=delay)
    with NamespaceLab(backend, pairs) as lab:
        # A ring, for its evenness: every device sends to one and receives from another.
        ring = dict.fromkeys(
            [*pairwise(lab.names), (lab.names[-1], lab.names[0])], link
        )
        lab.shaping.set(ring)
        shares = [
            100 * each / rate
            for each in udp_rates(lab.net, ring, 1.0, skip=0.2).values()
        ]
        bounds = (100 * RATE_LOWEST, 100 * RATE_HIGHEST)
        name = f"{pairs} pairs at {_bits(rate)}, {1e3 * delay:g} ms"
        yield Measurement(
            f"{name}: UDP on the wire, least", min(shares), "%", between=bounds
        )
        yield Measurement(
            f"{name}: UDP on the wire, most", max(shares), "%", between=bounds
        )
        gap = 2 * FRAME * 8 / rate
        found = flows(lab.net, list(ring), round(0.8 / gap), gap, size=FRAME - 42)
        worst = max(
            (median(flow.delays) for flow in found.values()),
            key=lambda each: abs(each - delay),
        )
        bound = delay_tolerance(delay)
        yield Measurement(
            f"{name}: half full, worst median delay",
            1e3 * worst,
            "ms",
            between=(1e3 * (delay - bound), 1e3 * (delay + bound)),
        )
        yield Measurement(
            f"{name}: half full, lost",
            sum(flow.lost for flow in found.values()),
            "packets",
            0,
        )


def live_change(
    lab: NamespaceLab, packets: int = 10_000, gap: float = 0.0003
) -> Iterator[Measurement]:
    """How soon a change takes effect, and what a flow between two others loses by many changes."""
    with lab.links([Link(delay=0.1), Link(rate=100e6, delay=0.002)]) as links:
        changed, third = links
        stop = threading.Event()
        lags: list[float] = []

        def change() -> None:
            for step in range(10_000):
                if stop.wait(0.05):
                    return
                asked = time.monotonic()
                lab.shaping.set({changed: _changed(step)})
                lags.append(time.monotonic() - asked)

        changing = threading.Thread(target=change)
        changing.start()
        found = flows(lab.net, [third], packets, gap)
        stop.set()
        changing.join()
    yield Measurement(
        f"changes of another link: lost of {packets}", found[third].lost, "packets", 0
    )
    with lab.links([Link(delay=0.1)]) as links:
        [pair] = links
        asked: list[float] = []

        def shorten() -> None:
            time.sleep(0.2)
            asked.append(time.monotonic())
            lab.shaping.set({pair: Link(delay=0.001)})

        changing = threading.Thread(target=shorten)
        changing.start()
        flow = flows(lab.net, [pair], 500, 0.001)[pair]
        changing.join()
    late = [flow.sent[number] for number, delay in flow.arrived if delay > 0.05]
    yield Measurement(
        "a change takes effect after",
        1e3 * (max(late) - asked[0]),
        "ms",
        1e3 * CHANGE_SECONDS,
    )


def _changed(step: int) -> Link:
    kinds = (
        Link(rate=5e6, delay=0.01),
        Link(delay=0.02, jitter=0.005, loss=0.1),
        Link(up=False),
        Link(delay=0.01, bursts=GilbertElliott(0.1, 0.5), corrupt=0.01),
        Link(),
        Link(delay=0.01, duplicate=0.1, reorder=0.1),
    )
    return kinds[step % len(kinds)]


def access(
    backend: str, uplink: float = 20e6, downlink: float = 10e6
) -> Iterator[Measurement]:
    """What two links together get of an uplink and of a downlink, of which each alone could take more."""
    with NamespaceLab(backend, 3) as lab:
        hub, one, other = lab.names
        endpoints = [replace(lab.net.endpoints[hub], uplink=uplink, downlink=downlink)]
        link = Link(rate=0.8 * uplink, delay=0.005)
        slower = Link(rate=0.8 * downlink, delay=0.005)
        out, into = [(hub, one), (hub, other)], [(one, hub), (other, hub)]
        lab.shaping.attach(
            endpoints, {**dict.fromkeys(out, link), **dict.fromkeys(into, slower)}
        )
        for name, pairs, each, limit in (
            ("uplink", out, link, uplink),
            ("downlink", into, slower, downlink),
        ):
            found = udp_rates(
                lab.net,
                dict.fromkeys(pairs, replace(each, rate=limit / 2)),
                1.0,
                skip=0.3,
            )
            bounds = (100 * RATE_LOWEST, 100 * RATE_HIGHEST)
            share, fair = (
                100 * sum(found.values()) / limit,
                100 * min(found.values()) / (limit / 2),
            )
            yield Measurement(
                f"{name} {_bits(limit)}: two links together", share, "%", between=bounds
            )
            yield Measurement(
                f"{name} {_bits(limit)}: the smaller part of its half",
                fair,
                "%",
                90,
                at_most=False,
            )
        lab.shaping.attach([lab.net.endpoints[hub]], {})
        found = udp_rates(lab.net, dict.fromkeys(into, slower), 0.6, skip=0.2)
        share = 100 * sum(found.values()) / (2 * 0.8 * downlink)
        bounds = (100 * RATE_LOWEST, 100 * RATE_HIGHEST)
        yield Measurement(
            "downlink lifted: two links together", share, "%", between=bounds
        )


def _counted(name: str, count: int, packets: int, probability: float) -> Measurement:
    lowest, highest = binomial_interval(packets, probability)
    return Measurement(
        name,
        100 * count / packets,
        "%",
        between=(100 * lowest / packets, 100 * highest / packets),
    )


def _correlation(values: Sequence[float]) -> float:
    mean = fmean(values)
    return (
        fmean((one - mean) * (other - mean) for one, other in pairwise(values))
        / pstdev(values) ** 2
    )


def conformance(backend: str, *, slow_host: bool = False) -> Iterator[Measurement]:
    """Measure every case; on a host as slow as a virtual machine without those that ask for a fast one."""
    with NamespaceLab(backend) as lab:
        cases: list[Callable[[], Iterator[Measurement]]] = [
            lambda: delays(lab),
            lambda: jitters(lab),
            lambda: losses(lab),
            lambda: bursts(lab),
            lambda: alterations(lab),
            lambda: live_change(lab),
        ]
        fastest = 250e6 if slow_host else 1e9
        for delay in RATE_DELAYS:
            points = [(rate, delay) for rate in RATES if not delay or rate <= fastest]
            points += [(fastest, delay)] if delay and fastest not in RATES else []
            cases.append(lambda points=points: rates(lab, points))  # type: ignore[misc]
        for case in cases:
            yield from settled(case)
    yield from settled(lambda: access(backend))
    yield from settled(lambda: many(backend, pairs=6 if slow_host else 20))


def measure() -> Iterator[Measurement]:
    """Yield the figures of each backend, or why there are none, and keep them in `RESULTS`."""
    if os.geteuid() != 0:
        yield Measurement(
            "links", 0, "", detail="not measured: network namespaces need root"
        )
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    for backend in LINK_BACKENDS.own:
        kept = RESULTS / f"{backend}.json"
        kept.unlink(missing_ok=True)
        try:
            if missing_modules()[backend]:
                document = _in_virtual_machine(backend)
                figures = [_figure(entry) for entry in document["figures"]]
                yield from (
                    replace(figure, name=f"{backend}: {figure.name}")
                    for figure in figures
                )
            else:
                figures = []
                for figure in conformance(backend):
                    figures.append(figure)
                    yield replace(figure, name=f"{backend}: {figure.name}")
                document = _document(backend, figures, ["--links", backend])
        except HostError as error:
            yield Measurement(
                f"{backend}: links", 0, "", detail=f"not measured: {error}"
            )
        else:
            kept.write_text(json.dumps(document, indent=2) + "\n")


def _document(
    backend: str, figures: Sequence[Measurement], arguments: Sequence[str]
) -> dict[str, Any]:
    """Return what `tools.bench.page` makes a table of."""
    machine = ["python tests/netem/vm.py --"] if os.environ.get("TESTBED_IN_VM") else []
    return {
        "backend": backend,
        "kernel": os.uname().release,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(
            [*machine, "python -m tools.bench.conformance", *arguments]
        ),
        "figures": [asdict(figure) for figure in figures],
    }


def _figure(entry: Mapping[str, Any]) -> Measurement:
    between = entry["between"]
    return Measurement(**{**entry, "between": tuple(between) if between else None})


def _in_virtual_machine(backend: str) -> dict[str, Any]:
    machine = ROOT / "tests/netem/vm.py"
    if not machine.exists():
        raise HostError(
            "this kernel has none, and a virtual machine is booted only from a checkout"
        )
    found = ROOT / ".build/vm/out/conformance.json"
    found.unlink(missing_ok=True)
    inside = [
        "-m",
        "tools.bench.conformance",
        "--links",
        backend,
        "--slow-host",
        "--json",
        str(found),
    ]
    booted = [
        sys.executable,
        str(machine),
        "--timeout",
        "3600",
        "--",
        sys.executable,
        *inside,
    ]
    done = subprocess.run(booted, check=False, capture_output=True, text=True)
    if not found.exists():
        raise HostError(
            f"the virtual machine gave no figures: {done.stderr.strip().splitlines()[-1:]}"
        )
    document: dict[str, Any] = json.loads(found.read_text())
    return document


def main() -> int:
    """Measure one backend and write its figures as JSON; status 1 when one is outside of its bounds."""
    parser = argparse.ArgumentParser(
        description="Measure whether a backend's links do what is asked of them."
    )
    parser.add_argument("--links", choices=[*LINK_BACKENDS], required=True)
    parser.add_argument(
        "--slow-host",
        action="store_true",
        help="leave out what only a fast host can do",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    figures = []
    for figure in conformance(arguments.links, slow_host=arguments.slow_host):
        figures.append(figure)
        print(
            f"{'ok ' if figure.reached else 'BAD'} {figure.name}: {figure.value:.5g} {figure.unit} {figure.detail}"
        )
        sys.stdout.flush()
    if arguments.json:
        document = _document(arguments.links, figures, _without_files(sys.argv[1:]))
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if all(figure.reached for figure in figures) else 1


def _without_files(words: Sequence[str]) -> list[str]:
    return [
        word
        for before, word in pairwise(["", *words])
        if "--json" not in (before, word)
    ]


if __name__ == "__main__":
    sys.exit(main())
