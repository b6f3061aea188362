"""Facts about engines for `testbed setup hosts`: identity, images, distance, and missing requirements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from testbed.common.errors import TestbedError
from testbed_controller.hosts.channel import Channel
from testbed_controller.hosts.contexts import Host, find_manager, reach
from testbed_controller.hosts.provision import make_keeper
from testbed_controller.lab.diagnosis import HostCheck
from testbed_controller.lab.engineaddress import context_names
from testbed_controller.lab.images import find_tags, image_exists
from testbed_controller.lab.removal import remove_from
from testbed_controller.lab.runstate import RunState, new_id

_KINDS = ("device", "shaper")
_RATE_BYTES = 32 << 20
"""Amount of data for the measurement of a rate, in bytes."""
BRINGS = "which the first run copies"
"""End of the texts about missing images, which prevent no run."""


@dataclass(frozen=True)
class HostReport:
    """The report about one host; times in seconds, unavailable values are None."""

    context: str
    node: str = ""
    address: str = ""
    cores: int | None = None
    memory: int | None = None
    """Bytes."""
    engine: str = ""
    manager: bool = False
    images: tuple[str, ...] = ()
    """Kinds of present images."""
    offset: float | None = None
    """The host's clock minus the controller's, in seconds."""
    uncertainty: float | None = None
    round_trip: float | None = None
    """Round trip over the docker context's connection, in seconds."""
    rate: float | None = None
    """Rate over the connection in bit/s."""
    missing: tuple[str, ...] = field(default=())
    """Obstacles to a run on the host, with remedies."""


def survey(wanted: Sequence[str]) -> list[HostReport]:
    """Return a report about each of these docker contexts, or about all by default."""
    asked = list(wanted) or context_names()
    with ThreadPoolExecutor(len(asked)) as pool:
        reached = list(pool.map(_try_reach, asked))
        # Two contexts may lead to one engine.
        first_by_engine: dict[str, str] = {}
        duplicate_of = dict.fromkeys(asked, "")
        for host in reached:
            if isinstance(host, Host):
                first = first_by_engine.setdefault(host.engine, host.name)
                if first != host.name:
                    duplicate_of[host.name] = first
        duplicates = [duplicate_of[name] for name in asked]
        return list(pool.map(_make_report, asked, reached, duplicates))


def check_hosts(wanted: Sequence[str]) -> Iterator[HostCheck]:
    """Yield a check for each of these docker contexts."""
    for report in survey(wanted):
        name = f"host {report.context}"
        # The first run copies missing images.
        lacking = [text for text in report.missing if not text.endswith(BRINGS)]
        if lacking:
            yield HostCheck(name, "missing", "; ".join(lacking), needed=True)
        else:
            place = report.address or report.node
            detail = f"Docker {report.engine}, {report.cores} cores, {place}"
            yield HostCheck(name, "ok", detail, needed=True)


def _try_reach(name: str) -> Host | str:
    try:
        return reach(name)
    except TestbedError as error:
        return str(error)


def _make_report(name: str, host: Host | str, duplicate_of: str) -> HostReport:
    if isinstance(host, str):
        return HostReport(name, missing=(host,))
    tags = find_tags(host.client)
    present = []
    missing = []
    if duplicate_of:
        missing.append(f"the same engine as {duplicate_of}: remove one of them")
    try:
        find_manager({name: host})
    except TestbedError as error:
        # A worker alone has no manager beside it, which is no fault of the host.
        if not host.address:
            missing.append(str(error))
    for kind in _KINDS:
        if image_exists(host.client, tags.by_kind[kind]):
            present.append(kind)
        else:
            missing.append(f"the image of the {kind}, {BRINGS}")
    facts: dict[str, float] = {}
    # The keeper, which measures, runs in the shaper's image.
    if "shaper" in present:
        try:
            facts = _measure_host(host, tags.shaper)
        except TestbedError as error:
            missing.append(str(error))
    return HostReport(
        context=name,
        node=host.node,
        address=host.address,
        cores=host.cores,
        memory=host.memory,
        engine=host.version,
        manager=host.manages,
        images=tuple(present),
        offset=facts.get("offset"),
        uncertainty=facts.get("uncertainty"),
        round_trip=facts.get("round_trip"),
        rate=facts.get("rate"),
        missing=tuple(missing),
    )


def _measure_host(host: Host, image: str) -> dict[str, float]:
    """Return clock, round trip and rate over a context's connection, using a temporary keeper."""
    # With a lease, the keeper removes itself if this process is killed.
    state = RunState(new_id("hosts"), "", lease=1.0)
    try:
        channel = Channel(host, make_keeper(host, state, image))
        try:
            return {**channel.clock.facts(), "rate": channel.rate(_RATE_BYTES)}
        finally:
            channel.close()
    finally:
        remove_from(host.client, state.run, recheck=False)
