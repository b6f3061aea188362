"""Conformance of each backend's links with the requested properties, measured on bare network namespaces.

    python -m tools.bench.conformance --links userspace --json out.json

`measure` is a part of ``python -m tools.bench``: it measures each backend at all points, netem in the virtual machine
of ``tests/netem`` if this kernel lacks the modules. Tests use the same cases at fewer points. Bounds are those of
`testbed_controller.shaping.tolerance`, and the 99 % binomial interval for random properties. As one correct measurement
in a hundred is outside this interval, measurements outside their bounds are repeated once.
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
from functools import partial
from itertools import groupby, pairwise, permutations
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
from tools.bench.flows import measure_flows, tcp_rates, udp_rates
from tools.bench.measurement import Measurement

RESULTS = BUILD / "conformance"
"""Folder for the results of `measure`, from which `tools.bench.page` makes the table in the documentation."""
JITTER_FRACTION = 0.1
"""Maximum relative error of a standard deviation."""
BURSTS_FRACTION = 0.1
"""Maximum relative error of the loss and the length of bursts."""
TCP_LOWEST = 0.92
"""Minimum share of TCP content in the rate on the wire, of which headers take 4.4 %."""
CHANGE_SECONDS = 0.05
"""Maximum time until a change of a link takes effect, in seconds."""
DELAYS = (0.0005, 0.001, 0.005, 0.02, 0.1, 0.5)
"""One-way delays in seconds."""
LOSSES = (0.001, 0.01, 0.05, 0.1, 0.3, 0.5)
"""Shares of lost packets."""
RATES = (250e3, 1e6, 10e6, 100e6, 1e9)
"""Rates in bit/s."""
RATE_DELAYS = (0.0, 0.02, 0.1)
"""One-way delays of the links whose rates are measured, in seconds."""
PACKETS = 20_000
"""Number of packets in measurements of random properties."""
_SECONDS_TO_FILL = 0.35
"""Duration of a train of datagrams at the rate of a link, in seconds."""


_DOWN = Link(up=False)


class NamespaceLab:
    """Namespaces with links shaped by a backend.

    All links are down, except the links that a case sets within a block.

    Example::

        with NamespaceLab("userspace") as lab, lab.links([Link(delay=0.02)]) as links:
            flows = measure_flows(lab.net, list(links), count=100, gap=0.003)
    """

    def __init__(self, backend: str, devices: int = 6) -> None:
        self.names = [f"d{index}" for index in range(devices)]
        self.shaping = Shaping(backend, seed=1)
        self.backend = str(self.shaping.facts()["backend"])
        self.net = Network(self.names)
        self.pairs = list(permutations(self.names, 2))
        self.shaping.attach(
            self.net.endpoints.values(), dict.fromkeys(self.pairs, _DOWN)
        )

    def __enter__(self) -> NamespaceLab:
        # At a higher priority, as the measurement is of the links and not of the load of the machine.
        self._priority = os.getpriority(os.PRIO_PROCESS, 0)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -10)
        return self

    def __exit__(self, *_: object) -> None:
        os.setpriority(os.PRIO_PROCESS, 0, self._priority)
        self.shaping.close()
        self.net.close()

    @contextlib.contextmanager
    def links(self, requested: Sequence[Link]) -> Iterator[dict[Pair, Link]]:
        """Set these links within the block, with reverse links of the same rates; yield the link of each pair."""
        ordered = sorted(self.pairs, key=lambda pair: (self._distance(pair), pair))
        # There may be fewer links than pairs.
        links = dict(zip(ordered, requested, strict=False))
        # TCP needs a way back, which is not measured.
        reverse_links = {}
        for (source, destination), link in links.items():
            reverse_links[destination, source] = Link(rate=link.rate)
        assert len(links) == len(requested)
        assert not links.keys() & reverse_links.keys()
        self.shaping.set({**reverse_links, **links})
        try:
            yield links
        finally:
            self.shaping.set(dict.fromkeys([*links, *reverse_links], _DOWN))

    def _distance(self, pair: Pair) -> int:
        """Return a sort key for pairs by which the first ones load all devices evenly."""
        source = self.names.index(pair[0])
        destination = self.names.index(pair[1])
        return (destination - source) % len(self.names)


def repeat_failed(case: Callable[[], Iterator[Measurement]]) -> Iterator[Measurement]:
    """Yield the measurements of a case; a second measurement replaces each measurement outside its bounds."""
    first = list(case())
    second = {}
    if not all(measurement.reached for measurement in first):
        # The whole case again, since all its links are measured at once.
        second = {measurement.name: measurement for measurement in case()}
    for measurement in first:
        if measurement.reached:
            yield measurement
        else:
            yield replace(second[measurement.name], detail="measured a second time")


def measure_delays(
    lab: NamespaceLab, points: Sequence[float] = DELAYS, packets: int = 200
) -> Iterator[Measurement]:
    """Measure the median of one-way delays, on links of all given delays at once."""
    requested_links = [Link(delay=delay) for delay in points]
    # Until the last packet of the slowest link has arrived.
    linger = max(points) + 0.2
    with lab.links(requested_links) as links:
        measured = measure_flows(lab.net, list(links), packets, 0.003, linger=linger)
    for pair, link in links.items():
        bound = delay_tolerance(link.delay) * 1e3
        middle = median(measured[pair].delays) * 1e3
        requested = link.delay * 1e3
        yield Measurement(
            f"delay {requested:g} ms: median",
            middle,
            "ms",
            between=(requested - bound, requested + bound),
        )


def measure_jitters(
    lab: NamespaceLab, jitter: float = 0.004, delay: float = 0.02, packets: int = 3000
) -> Iterator[Measurement]:
    """Measure the standard deviation of delays of each distribution, and their correlation if supported."""
    links = []
    for distribution in ("normal", "uniform", "pareto"):
        links.append(Link(delay=delay, jitter=jitter, distribution=distribution))
    # netem refuses correlated jitter, since its numbers lose the correlation (docs/fidelity.md).
    correlated = Link(delay=delay, jitter=jitter, jitter_correlation=0.5)
    if LINK_BACKENDS.find(lab.backend).link_problem(correlated, None) is None:
        links.append(correlated)
    linger = delay + 8 * jitter + 0.2
    with lab.links(links) as link_by_pair:
        pairs = list(link_by_pair)
        measured = measure_flows(lab.net, pairs, packets, 0.001, linger=linger)
    for pair, link in link_by_pair.items():
        requested = link.jitter * 1e3
        name = f"jitter {requested:g} ms {link.distribution}"
        values = measured[pair].delays
        if link.jitter_correlation:
            by_number = [delay for _, delay in sorted(measured[pair].arrived)]
            name += f", correlation {link.jitter_correlation:g}"
            yield Measurement(
                f"{name}: correlation",
                _autocorrelation(by_number),
                "",
                between=(0.4, 0.6),
            )
        bounds = (requested * (1 - JITTER_FRACTION), requested * (1 + JITTER_FRACTION))
        yield Measurement(
            f"{name}: deviation", pstdev(values) * 1e3, "ms", between=bounds
        )
        # Three standard errors of the mean beside the tolerance of the delay.
        bound = delay_tolerance(link.delay) * 1e3 + 3 * requested / math.sqrt(packets)
        mean = fmean(values) * 1e3
        yield Measurement(
            f"{name}: mean",
            mean,
            "ms",
            between=(delay * 1e3 - bound, delay * 1e3 + bound),
        )


def measure_losses(
    lab: NamespaceLab, points: Sequence[float] = LOSSES, packets: int = PACKETS
) -> Iterator[Measurement]:
    """Measure the share of lost packets, on links of all given losses at once."""
    with lab.links([Link(loss=loss) for loss in points]) as links:
        measured = measure_flows(lab.net, list(links), packets, 0.0, read_every=50)
    for pair, link in links.items():
        name = f"loss {100 * link.loss:g} %"
        yield _random_share(name, measured[pair].lost, packets, link.loss)


def measure_bursts(
    lab: NamespaceLab, packets: int = 2 * PACKETS
) -> Iterator[Measurement]:
    """Measure loss and mean burst length of Gilbert-Elliott links and of a link with correlated loss."""
    requested_links = [
        Link(bursts=GilbertElliott(p=0.05, r=0.5)),
        Link(bursts=GilbertElliott(p=0.04, r=0.25)),
        Link(loss=0.1, loss_correlation=0.4),
    ]
    with lab.links(requested_links) as links:
        measured = measure_flows(lab.net, list(links), packets, 0.0, read_every=50)
    for pair, link in links.items():
        states = loss_chain(link)
        assert states is not None
        name = "loss 10 %, correlation 0.4"
        if link.bursts:
            name = f"Gilbert-Elliott p {100 * states.p:g} % r {100 * states.r:g} %"
        fates = measured[pair].fates
        low, high = 1 - BURSTS_FRACTION, 1 + BURSTS_FRACTION
        share = 100 * states.loss
        lost = 100 * sum(fates) / packets
        bounds = (share * low, share * high)
        yield Measurement(f"{name}: loss", lost, "%", between=bounds)
        # The bad state ends after each packet with the probability r.
        length = 1 / states.r
        lengths = []
        for is_lost, run in groupby(fates):
            if is_lost:
                lengths.append(len(list(run)))
        bounds = (length * low, length * high)
        name = f"{name}: mean burst"
        yield Measurement(name, fmean(lengths), "packets", between=bounds)


def measure_alterations(
    lab: NamespaceLab, packets: int = PACKETS
) -> Iterator[Measurement]:
    """Measure duplication, reordering and corruption: three links with one of them, and a link with all."""
    # With a delay, since a reordered packet is one that skips the delay.
    requested_links = [
        Link(delay=0.005, duplicate=0.05),
        Link(delay=0.005, reorder=0.05),
        Link(delay=0.005, corrupt=0.05),
        Link(delay=0.005, duplicate=0.02, reorder=0.03, corrupt=0.01, loss=0.02),
    ]
    # Large datagrams, in which the unchecked bits of the Ethernet header are a small part.
    with lab.links(requested_links) as links:
        measured = measure_flows(lab.net, list(links), packets, 0.0002, size=1000)
    duplicating, reordering, corrupting, combined = (measured[pair] for pair in links)
    yield _random_share("duplicate 5 %", duplicating.duplicates, packets, 0.05)
    yield Measurement("duplicate 5 %: lost", duplicating.lost, "packets", 0)
    # A reordered packet skips the delay of 5 ms.
    early = sum(delay < 0.0025 for delay in reordering.delays)
    yield _random_share("reorder 5 %", early, packets, 0.05)
    yield _random_share("corrupt 5 %", corrupting.lost, packets, 0.05)
    yield Measurement(
        "corrupt 5 %: seen without checksum",
        corrupting.damaged,
        "packets",
        1,
        at_most=False,
    )
    yield _random_share(
        "2 % lost, 1 % corrupt, 2 % twice",
        combined.lost,
        packets,
        _lost_share(requested_links[-1]),
    )


def _lost_share(link: Link) -> float:
    """Return the expected share of datagrams without an intact copy."""
    lost = expected_loss(link)
    # Copies are lost independently, so a duplicated datagram is lost if both copies are.
    return lost * (1 - link.duplicate) + lost * lost * link.duplicate


def measure_rates(
    lab: NamespaceLab,
    points: Sequence[tuple[float, float]],
    *,
    tcp: bool = True,
    patience: float = 1.0,
) -> Iterator[Measurement]:
    """Measure the throughput of UDP and TCP on links with these (rate, delay).

    Slow links are measured together; fast links one by one, as the host may be too slow for several.
    """
    slow = []
    groups = []
    for rate, delay in points:
        link = Link(rate=rate, delay=delay)
        if rate <= 10e6:
            slow.append(link)
        else:
            groups.append([link])
    if slow:
        groups.insert(0, slow)
    for group in groups:
        with lab.links(group) as links:
            yield from _udp_shares(lab, links)
            if tcp:
                yield from _tcp_shares(lab, links, patience)


def _udp_shares(lab: NamespaceLab, links: Mapping[Pair, Link]) -> Iterator[Measurement]:
    slowest = min(link.rate or math.inf for link in links.values())
    # At least 60 frames on the slowest link, so that one frame more or less stays within the bounds.
    seconds = max(_SECONDS_TO_FILL, 60 * FRAME * 8 / slowest)
    measured = udp_rates(lab.net, links, seconds, skip=0.1 * seconds)
    bounds = (100 * RATE_LOWEST, 100 * RATE_HIGHEST)
    for pair, link in links.items():
        yield _rate_share("UDP on the wire", link, measured[pair], bounds)


def _tcp_shares(
    lab: NamespaceLab, links: Mapping[Pair, Link], patience: float
) -> Iterator[Measurement]:
    # The window reaches the capacity of the link in some ten round trips; a slow link with a long queue needs more.
    longest = max(link.delay for link in links.values())
    slowest = min(link.rate or math.inf for link in links.values())
    skip = patience * (0.1 + 30 * longest + 20 * FRAME * 8 / slowest)
    counted = max(0.5, skip, 80 * FRAME * 8 / slowest)
    measured = tcp_rates(lab.net, links, skip + counted, skip=skip)
    bounds = (100 * TCP_LOWEST, 100.0)
    for pair, link in links.items():
        yield _rate_share("TCP content", link, measured[pair], bounds)


def _rate_share(
    traffic: str, link: Link, rate: float, bounds: tuple[float, float]
) -> Measurement:
    assert link.rate
    name = f"{_format_rate(link.rate)}, {1e3 * link.delay:g} ms: {traffic}"
    return Measurement(name, 100 * rate / link.rate, "%", between=bounds)


def _format_rate(rate: float) -> str:
    """Return a rate in bit/s with a unit.

    >>> _format_rate(2.5e8), _format_rate(250e3)
    ('250 mbit', '250 kbit')
    """
    for factor, unit in ((1e9, "gbit"), (1e6, "mbit")):
        if rate >= factor:
            return f"{rate / factor:g} {unit}"
    return f"{rate / 1e3:g} kbit"


def measure_many_pairs(
    backend: str, pairs: int = 20, rate: float = 20e6, delay: float = 0.02
) -> Iterator[Measurement]:
    """Measure many pairs at once: the rates of full links, then the delays of half full links."""
    link = Link(rate=rate, delay=delay)
    with NamespaceLab(backend, pairs) as lab:
        # A ring loads all devices evenly: each sends to one neighbour and receives from the other.
        ring = dict.fromkeys(
            [*pairwise(lab.names), (lab.names[-1], lab.names[0])], link
        )
        lab.shaping.set(ring)
        measured_rates = udp_rates(lab.net, ring, 1.0, skip=0.2)
        shares = [100 * each / rate for each in measured_rates.values()]
        bounds = (100 * RATE_LOWEST, 100 * RATE_HIGHEST)
        name = f"{pairs} pairs at {_format_rate(rate)}, {1e3 * delay:g} ms"
        yield Measurement(
            f"{name}: UDP on the wire, least", min(shares), "%", between=bounds
        )
        yield Measurement(
            f"{name}: UDP on the wire, most", max(shares), "%", between=bounds
        )
        # A frame in every second transmission time, so that no queue adds to the delay.
        gap = 2 * FRAME * 8 / rate
        measured = measure_flows(
            lab.net, list(ring), round(0.8 / gap), gap, size=FRAME - 42
        )
        medians = [median(flow.delays) for flow in measured.values()]
        worst = max(medians, key=lambda each: abs(each - delay))
        bound = delay_tolerance(delay)
        yield Measurement(
            f"{name}: half full, worst median delay",
            1e3 * worst,
            "ms",
            between=(1e3 * (delay - bound), 1e3 * (delay + bound)),
        )
        yield Measurement(
            f"{name}: half full, lost",
            sum(flow.lost for flow in measured.values()),
            "packets",
            0,
        )


def measure_live_change(
    lab: NamespaceLab, packets: int = 10_000, gap: float = 0.0003
) -> Iterator[Measurement]:
    """Measure the losses on a link while another is changed many times, and the time until a change takes effect."""
    with lab.links([Link(delay=0.1), Link(rate=100e6, delay=0.002)]) as links:
        changed_link, observed_link = links
        stop = threading.Event()

        def change() -> None:
            for step in range(10_000):
                if stop.wait(0.05):
                    return
                lab.shaping.set({changed_link: _link_at_step(step)})

        changing = threading.Thread(target=change)
        changing.start()
        flows = measure_flows(lab.net, [observed_link], packets, gap)
        stop.set()
        changing.join()
    yield Measurement(
        f"changes of another link: lost of {packets}",
        flows[observed_link].lost,
        "packets",
        0,
    )
    with lab.links([Link(delay=0.1)]) as links:
        [pair] = links
        change_times: list[float] = []

        def shorten() -> None:
            time.sleep(0.2)
            change_times.append(time.monotonic())
            lab.shaping.set({pair: Link(delay=0.001)})

        changing = threading.Thread(target=shorten)
        changing.start()
        flow = measure_flows(lab.net, [pair], 500, 0.001)[pair]
        changing.join()
    # Packets sent before the change took effect have the old delay of 100 ms, all others one of 1 ms.
    late = [flow.sent[number] for number, delay in flow.arrived if delay > 0.05]
    elapsed = max(late) - change_times[0]
    name = "a change takes effect after"
    yield Measurement(name, 1e3 * elapsed, "ms", 1e3 * CHANGE_SECONDS)


def _link_at_step(step: int) -> Link:
    kinds = (
        Link(rate=5e6, delay=0.01),
        Link(delay=0.02, jitter=0.005, loss=0.1),
        Link(up=False),
        Link(delay=0.01, bursts=GilbertElliott(0.1, 0.5), corrupt=0.01),
        Link(),
        Link(delay=0.01, duplicate=0.1, reorder=0.1),
    )
    return kinds[step % len(kinds)]


def measure_access(
    backend: str, uplink: float = 20e6, downlink: float = 10e6
) -> Iterator[Measurement]:
    """Measure how two links share an uplink and a downlink whose rate is below the sum of theirs."""
    with NamespaceLab(backend, 3) as lab:
        hub, one, other = lab.names
        endpoints = [replace(lab.net.endpoints[hub], uplink=uplink, downlink=downlink)]
        link = Link(rate=0.8 * uplink, delay=0.005)
        slower = Link(rate=0.8 * downlink, delay=0.005)
        out = [(hub, one), (hub, other)]
        into = [(one, hub), (other, hub)]
        links = dict.fromkeys(out, link) | dict.fromkeys(into, slower)
        lab.shaping.attach(endpoints, links)
        for name, pairs, each, limit in (
            ("uplink", out, link, uplink),
            ("downlink", into, slower, downlink),
        ):
            sent = dict.fromkeys(pairs, replace(each, rate=limit / 2))
            measured = udp_rates(lab.net, sent, 1.0, skip=0.3)
            bounds = (100 * RATE_LOWEST, 100 * RATE_HIGHEST)
            share = 100 * sum(measured.values()) / limit
            smaller = 100 * min(measured.values()) / (limit / 2)
            yield Measurement(
                f"{name} {_format_rate(limit)}: two links together",
                share,
                "%",
                between=bounds,
            )
            yield Measurement(
                f"{name} {_format_rate(limit)}: the smaller part of its half",
                smaller,
                "%",
                90,
                at_most=False,
            )
        # Attached again without limits, while the devices run.
        lab.shaping.attach([lab.net.endpoints[hub]], {})
        measured = udp_rates(lab.net, dict.fromkeys(into, slower), 0.6, skip=0.2)
        share = 100 * sum(measured.values()) / (2 * 0.8 * downlink)
        bounds = (100 * RATE_LOWEST, 100 * RATE_HIGHEST)
        yield Measurement(
            "downlink lifted: two links together", share, "%", between=bounds
        )


def _random_share(
    name: str, count: int, packets: int, probability: float
) -> Measurement:
    """Return the share of affected packets, with the 99 % binomial interval as bounds."""
    lowest, highest = binomial_interval(packets, probability)
    return Measurement(
        name,
        100 * count / packets,
        "%",
        between=(100 * lowest / packets, 100 * highest / packets),
    )


def _autocorrelation(values: Sequence[float]) -> float:
    """Return the autocorrelation of successive values."""
    mean = fmean(values)
    products = []
    for one, following in pairwise(values):
        products.append((one - mean) * (following - mean))
    return fmean(products) / pstdev(values) ** 2


def measure_backend(backend: str, *, slow_host: bool = False) -> Iterator[Measurement]:
    """Measure every case.

    A ``slow_host``, such as a virtual machine, measures fewer pairs and lower rates.
    """
    with NamespaceLab(backend) as lab:
        cases: list[Callable[[], Iterator[Measurement]]] = [
            lambda: measure_delays(lab),
            lambda: measure_jitters(lab),
            lambda: measure_losses(lab),
            lambda: measure_bursts(lab),
            lambda: measure_alterations(lab),
            lambda: measure_live_change(lab),
        ]
        fastest = 250e6 if slow_host else 1e9
        for delay in RATE_DELAYS:
            rates = [*RATES]
            # With a delay, the host has to hold all packets that are under way.
            if delay:
                rates = [rate for rate in RATES if rate <= fastest]
                if fastest not in RATES:
                    rates.append(fastest)
            points = [(rate, delay) for rate in rates]
            cases.append(partial(measure_rates, lab, points))
        for case in cases:
            yield from repeat_failed(case)
    yield from repeat_failed(lambda: measure_access(backend))
    yield from repeat_failed(
        lambda: measure_many_pairs(backend, pairs=6 if slow_host else 20)
    )


def measure() -> Iterator[Measurement]:
    """Yield the measurements of each backend, and store the results of each in a file in `RESULTS`.

    For a backend that cannot be measured, the detail of the only measurement gives the reason.
    """
    if os.geteuid() != 0:
        yield Measurement(
            "links", 0, "", detail="not measured: network namespaces need root"
        )
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    for backend in LINK_BACKENDS.own:
        file = RESULTS / f"{backend}.json"
        # After a failure, the page must not show results of an earlier measurement.
        file.unlink(missing_ok=True)
        try:
            if missing_modules()[backend]:
                document = _in_virtual_machine(backend)
                for entry in document["figures"]:
                    measurement = _measurement_of(entry)
                    yield replace(measurement, name=f"{backend}: {measurement.name}")
            else:
                measurements = []
                for measurement in measure_backend(backend):
                    measurements.append(measurement)
                    yield replace(measurement, name=f"{backend}: {measurement.name}")
                document = _make_document(backend, measurements, ["--links", backend])
        except HostError as error:
            yield Measurement(
                f"{backend}: links", 0, "", detail=f"not measured: {error}"
            )
        else:
            file.write_text(json.dumps(document, indent=2) + "\n")


def _make_document(
    backend: str, measurements: Sequence[Measurement], arguments: Sequence[str]
) -> dict[str, Any]:
    """Return the content of a results file for `tools.bench.page`."""
    machine = ["python tests/netem/vm.py --"] if os.environ.get("TESTBED_IN_VM") else []
    return {
        "backend": backend,
        "kernel": os.uname().release,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(
            [*machine, "python -m tools.bench.conformance", *arguments]
        ),
        "figures": [asdict(measurement) for measurement in measurements],
    }


def _measurement_of(entry: Mapping[str, Any]) -> Measurement:
    between = entry["between"]
    return Measurement(**{**entry, "between": tuple(between) if between else None})


def _in_virtual_machine(backend: str) -> dict[str, Any]:
    machine = ROOT / "tests/netem/vm.py"
    if not machine.exists():
        raise HostError(
            "this kernel lacks the modules, and the virtual machine is available only in a checkout"
        )
    # The machine shares this folder; a file of an earlier measurement must not pass for a result of this one.
    results = ROOT / ".build/vm/out/conformance.json"
    results.unlink(missing_ok=True)
    command = [sys.executable, str(machine), "--timeout", "3600", "--"]
    command += [sys.executable, "-m", "tools.bench.conformance", "--links", backend]
    command += ["--slow-host", "--json", str(results)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if not results.exists():
        errors = result.stderr.strip().splitlines()[-1:]
        raise HostError(f"the virtual machine wrote no results: {errors}")
    document: dict[str, Any] = json.loads(results.read_text())
    return document


def main() -> int:
    """Measure one backend and write the results as JSON; return 1 if a result is outside its bounds."""
    parser = argparse.ArgumentParser(
        description="Measure the conformance of a backend's links with the requested properties."
    )
    parser.add_argument("--links", choices=[*LINK_BACKENDS], required=True)
    parser.add_argument(
        "--slow-host",
        action="store_true",
        help="omit measurements that require a fast host",
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    measurements = []
    for measurement in measure_backend(arguments.links, slow_host=arguments.slow_host):
        measurements.append(measurement)
        mark = "ok " if measurement.reached else "BAD"
        value = f"{measurement.value:.5g} {measurement.unit}"
        print(f"{mark} {measurement.name}: {value} {measurement.detail}")
        sys.stdout.flush()
    if arguments.json:
        document = _make_document(
            arguments.links, measurements, _without_files(sys.argv[1:])
        )
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if all(measurement.reached for measurement in measurements) else 1


def _without_files(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without ``--json FILE``.

    >>> _without_files(["--links", "netem", "--json", "netem.json"])
    ['--links', 'netem']
    """
    remaining = []
    for previous, word in pairwise(["", *words]):
        if "--json" not in (previous, word):
            remaining.append(word)
    return remaining


if __name__ == "__main__":
    sys.exit(main())
