"""Facts about engines for `testbed setup hosts`: identity, images, distance, and missing requirements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from testbed.common.errors import TestbedError
from testbed_controller.hosts.channel import Channel
from testbed_controller.hosts.contexts import Host, manager, reach
from testbed_controller.hosts.provision import make_keeper
from testbed_controller.lab.diagnosis import HostCheck
from testbed_controller.lab.engineaddress import context_names
from testbed_controller.lab.images import image_exists, present_tags
from testbed_controller.lab.removal import remove_from
from testbed_controller.lab.runstate import RunState, new_id

_KINDS = ("device", "shaper")
_RATE_BYTES = 32 << 20
BRINGS = "which the first run brings"


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
        engines: dict[str, str] = {}
        doubled = {
            each.name: other
            for each in reached
            if isinstance(each, Host)
            and (other := engines.setdefault(each.engine, each.name)) != each.name
        }
        return list(
            pool.map(
                lambda each: _make_report(each, doubled),
                zip(asked, reached, strict=True),
            )
        )


def check_hosts(wanted: Sequence[str]) -> Iterator[HostCheck]:
    """Yield a check for each of these docker contexts."""
    for report in survey(wanted):
        name, lacking = (
            f"host {report.context}",
            [each for each in report.missing if not each.endswith(BRINGS)],
        )
        detail = (
            "; ".join(lacking)
            or f"Docker {report.engine}, {report.cores} cores, {report.address or report.node}"
        )
        yield HostCheck(name, "missing" if lacking else "ok", detail, needed=True)


def _try_reach(name: str) -> Host | str:
    try:
        return reach(name)
    except TestbedError as error:
        return str(error)


def _make_report(asked: tuple[str, Host | str], doubled: dict[str, str]) -> HostReport:
    name, host = asked
    if isinstance(host, str):
        return HostReport(name, missing=(host,))
    tags = present_tags(host.client)
    there = tuple(
        kind for kind in _KINDS if image_exists(host.client, tags.by_kind[kind])
    )
    missing = (
        [f"the same engine as {doubled[name]}: remove one of them"]
        if name in doubled
        else []
    )
    try:
        manager({name: host})
    except TestbedError as error:
        if not host.address:
            missing.append(str(error))
    missing += [
        f"the image of the {kind}, {BRINGS}" for kind in _KINDS if kind not in there
    ]
    facts: dict[str, float] = {}
    if "shaper" in there:
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
        images=there,
        offset=facts.get("offset"),
        uncertainty=facts.get("uncertainty"),
        round_trip=facts.get("round_trip"),
        rate=facts.get("rate"),
        missing=tuple(missing),
    )


def _measure_host(host: Host, image: str) -> dict[str, float]:
    """Return clock, round trip and rate over a context's connection, using a temporary keeper."""
    state = RunState(new_id("hosts"), "", lease=1.0)
    try:
        channel = Channel(host, make_keeper(host, state, image))
        try:
            return {**channel.clock.facts(), "rate": channel.rate(_RATE_BYTES)}
        finally:
            channel.close()
    finally:
        remove_from(host.client, state.run, settle=False)
