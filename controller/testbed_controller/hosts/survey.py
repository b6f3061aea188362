"""Facts about engines for `testbed setup hosts`: identity, images, distance, and missing requirements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from testbed.common.errors import TestbedError
from testbed_controller.hosts.channel import Channel
from testbed_controller.hosts.contexts import Host, check_member, reach
from testbed_controller.hosts.provision import make_keeper
from testbed_controller.lab.diagnosis import HostCheck
from testbed_controller.lab.engineaddress import context_names
from testbed_controller.lab.images import find_tags, image_exists
from testbed_controller.lab.removal import remove_from
from testbed_controller.lab.runstate import RunState, new_id

_KINDS = ("device", "shaper")
"""Kinds of images that a host needs."""
_RATE_BYTES = 32 << 20
"""Amount of data for the measurement of a rate, in bytes."""
COPIED_BY_FIRST_RUN = "which the first run copies"
"""End of the texts about missing images, by which `check_hosts` recognises them: they do not prevent a run."""


@dataclass(frozen=True)
class HostReport:
    """The report about one host; values are None or empty if the engine does not respond."""

    context: str
    node: str = ""
    address: str = ""
    cores: int | None = None
    memory: int | None = None
    """Memory in bytes."""
    engine: str = ""
    """Version of Docker."""
    manager: bool = False
    """Whether the host is a manager of the swarm."""
    images: tuple[str, ...] = ()
    """Kinds of present images."""
    offset: float | None = None
    """The host's clock minus the controller's, in seconds."""
    uncertainty: float | None = None
    """Uncertainty of ``offset`` in seconds."""
    round_trip: float | None = None
    """Round trip over the docker context's connection, in seconds."""
    rate: float | None = None
    """Rate over the connection in bit/s."""
    missing: tuple[str, ...] = ()
    """Obstacles to a run on the host, with remedies."""


def survey(wanted: Sequence[str]) -> list[HostReport]:
    """Return a report about each of these docker contexts; about all contexts if none is named."""
    contexts = list(wanted) or context_names()
    with ThreadPoolExecutor(len(contexts)) as pool:
        hosts = list(pool.map(_try_reach, contexts))
        # Two contexts may lead to one engine.
        first_by_engine: dict[str, str] = {}
        duplicate_of = dict.fromkeys(contexts, "")
        for host in hosts:
            if isinstance(host, Host):
                first = first_by_engine.setdefault(host.engine_id, host.name)
                if first != host.name:
                    duplicate_of[host.name] = first
        duplicates = [duplicate_of[name] for name in contexts]
        return list(pool.map(_make_report, contexts, hosts, duplicates))


def check_hosts(wanted: Sequence[str]) -> Iterator[HostCheck]:
    """Yield a check for each of these docker contexts."""
    for report in survey(wanted):
        name = f"host {report.context}"
        # A missing image does not prevent a run, since the first run copies it.
        obstacles = [
            text for text in report.missing if not text.endswith(COPIED_BY_FIRST_RUN)
        ]
        if obstacles:
            yield HostCheck(name, "missing", "; ".join(obstacles), needed=True)
        else:
            place = report.address or report.node
            detail = f"Docker {report.engine}, {report.cores} cores, {place}"
            yield HostCheck(name, "ok", detail, needed=True)


def _try_reach(name: str) -> Host | str:
    """Return the host of a docker context, or the error message."""
    try:
        return reach(name)
    except TestbedError as error:
        return str(error)


def _make_report(name: str, host: Host | str, duplicate_of: str) -> HostReport:
    """Return the report about a context; ``host`` is the result of `_try_reach`.

    ``duplicate_of`` is another context of the same engine, empty without one.
    """
    if isinstance(host, str):
        return HostReport(name, missing=(host,))
    tags = find_tags(host.client)
    present = []
    missing = []
    if duplicate_of:
        missing.append(f"the same engine as {duplicate_of}: remove one of them")
    try:
        check_member(host)
    except TestbedError as error:
        missing.append(str(error))
    for kind in _KINDS:
        if image_exists(host.client, tags.by_kind[kind]):
            present.append(kind)
        else:
            missing.append(f"the image of the {kind}, {COPIED_BY_FIRST_RUN}")
    facts: dict[str, float] = {}
    # The keeper of the measurement runs in the shaper's image.
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
        manager=host.is_manager,
        images=tuple(present),
        offset=facts.get("offset"),
        uncertainty=facts.get("uncertainty"),
        round_trip=facts.get("round_trip"),
        rate=facts.get("rate"),
        missing=tuple(missing),
    )


def _measure_host(host: Host, image: str) -> dict[str, float]:
    """Return clock, round trip and rate over a context's connection, using a temporary keeper."""
    # A keeper with a lease ends by itself if this process is killed.
    state = RunState(new_id("hosts"), "", lease=1.0)
    try:
        channel = Channel(host, make_keeper(host, state, image))
        try:
            return {
                **channel.estimator.facts(),
                "rate": channel.measure_rate(_RATE_BYTES),
            }
        finally:
            channel.close()
    finally:
        remove_from(host.client, state.run, recheck=False)
