"""Requirements of the testbed on this machine: checks and remedies."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import docker
from docker.errors import APIError

from testbed.common.errors import HostError, InputError
from testbed.common.quantities import format_duration, format_rate
from testbed.network.checks import SHAPER
from testbed_controller.lab import capability
from testbed_controller.lab.clients import Shaper
from testbed_controller.lab.clocks import EngineClock
from testbed_controller.lab.containers import (
    look,
    make_container,
    published_url,
    shaper_settings,
)
from testbed_controller.lab.engine import (
    connect,
    facts,
    lab_problem,
    may_start,
    refusal_within,
)
from testbed_controller.lab.engineaddress import EngineAddress, chosen_engine
from testbed_controller.lab.health import Health
from testbed_controller.lab.images import (
    REGISTRY_BASE,
    image_exists,
    image_folder,
    present_names,
)
from testbed_controller.lab.networks import make_control_network
from testbed_controller.lab.removal import remove_run
from testbed_controller.lab.runstate import RunState, new_id
from testbed_controller.shaping.backend import LINK_BACKENDS
from testbed_controller.shaping.backends import MODULES, MODULES_HELP
from testbed_controller.shaping.capability import DEVICE_RATE

CheckStatus = Literal["ok", "missing", "unknown"]

_REGISTRY_PATIENCE = 5.0
_ROOM = 6 * 10**9
"""Free disk space for images in bytes: they take half of it, and all of it while they are built."""
_ROOM_WITH_CUDA = 16 * 10**9
_SHAPER_LEASE = 120.0
"""Lease of the test shaper in seconds."""
_TRY_LINKS = (
    "import json, os; from testbed_controller.shaping.backend import adopt_backends; "
    "from testbed_controller.shaping.backends import backend_problems; "
    "adopt_backends(os.environ); print(json.dumps(backend_problems()))"
)


@dataclass(frozen=True)
class HostCheck:
    """The result of one check, with a remedy for a failed one."""

    name: str
    status: CheckStatus
    detail: str
    help: str = ""
    needed: bool = False
    """Whether containers require it (`--runtime simulate` needs none of the checks)."""


def examine(*, measure: bool = False) -> Iterator[HostCheck]:
    """Yield the results of all checks; nothing on the machine is changed.

    With ``measure``, the link capacity of each backend is measured for some seconds and stored, so that `testbed run`
    can refuse faster links in advance. Example::

        for check in examine():
            print(check.name, check.status, check.detail)
    """
    yield _check_python()
    connected = _check_connection()
    if isinstance(connected, HostCheck):
        yield connected
        yield from _check_host(None)
        return
    client, engine = connected
    yield from _check_engine(client, engine)
    usable = lab_problem(client, engine) is None
    image = present_names(client).shaper
    backends = list(_check_links(client, image)) if usable else []
    yield from backends
    if (
        usable
        and image_exists(client, image)
        and not any(check.needed for check in backends)
    ):
        yield _check_shaper(client, image)
    yield from _check_host(client)
    if measure:
        for backend in LINK_BACKENDS:
            if any(_works(check, backend) for check in backends):
                yield _measure_capacity(client, backend)


def _check_connection() -> tuple[docker.DockerClient, EngineAddress] | HostCheck:
    """Return a client of the chosen engine, or a failed check."""
    try:
        engine = chosen_engine()
    except HostError as error:
        return HostCheck(
            "engine",
            "missing",
            "the current docker context is unknown",
            str(error),
            needed=True,
        )
    try:
        return connect(engine), engine
    except HostError as error:
        startable = may_start(engine) and shutil.which("apt-get") is not None
        remedy = (
            "'testbed setup images' as root installs and starts one"
            if startable
            else str(error)
        )
        return HostCheck(
            "engine", "missing", "no engine responds", remedy, needed=not startable
        )


def _works(check: HostCheck, backend: str) -> bool:
    return check.name == f"links: {backend}" and check.status == "ok"


def _measure_capacity(client: docker.DockerClient, backend: str) -> HostCheck:
    name = f"links: how far, {backend}"
    try:
        measured = capability.measure(client, backend)
    except HostError as error:
        return HostCheck(name, "unknown", str(error), "try again on an idle machine")
    if measured.rate is None or measured.delay is None:
        return HostCheck(
            name,
            "missing",
            "no link within its tolerance",
            "use an idle machine or more processors",
        )
    detail = (
        f"up to {format_rate(measured.rate)}, from {format_duration(measured.delay)} on"
    )
    if measured.devices is not None and measured.packet_cost is not None:
        detail += (
            f"; about {measured.devices} devices that each send {format_rate(DEVICE_RATE)} without a pause "
            f"({measured.packet_cost * 1e6:.0f} us of a processor a packet)"
        )
    return HostCheck(name, "ok", detail)


def _judge(
    name: str, lacking: str, success: str, remedy: str, *, needed: bool = False
) -> HostCheck:
    """Return a failed check with a remedy if something is ``lacking``, otherwise a successful one."""
    if lacking:
        return HostCheck(name, "missing", lacking, remedy, needed)
    return HostCheck(name, "ok", success, needed=needed)


def _check_python() -> HostCheck:
    lacking = [
        name
        for name in ("torch", "docker", "flask", "safetensors")
        if importlib.util.find_spec(name) is None
    ]
    version = platform.python_version()
    without = f"{version} without {', '.join(lacking)}" if lacking else ""
    helps = "install them with pip, or in a checkout with 'make environment'"
    return _judge(
        "python", without, f"{version} in {sys.prefix}", helps, needed=bool(lacking)
    )


def _check_engine(
    client: docker.DockerClient, engine: EngineAddress
) -> Iterator[HostCheck]:
    engine_facts = facts(client)
    cgroup, at = engine_facts["cgroup"], f" at {engine.title}" if engine.chosen else ""
    version = f"{engine_facts['version']} (API {engine_facts['api']})"
    description = f"{engine_facts['name']} {version} on {engine_facts['system']}{at}"
    reason, remedy = lab_problem(client, engine) or ("", "")
    yield _judge("engine", reason, description, remedy, needed=True)
    yield HostCheck(
        "kernel", "ok", f"{engine_facts['kernel']}, {engine_facts['architecture']}"
    )
    without = (
        f"{cgroup} without limits on {', '.join(engine_facts['unlimited'])}"
        if engine_facts["unlimited"]
        else ""
    )
    helps = "boot with cgroup_enable=memory, or use cgroup v2; otherwise device limits are ignored"
    yield _judge(
        "cgroup", without, f"{cgroup} with limits on memory and processes", helps
    )
    copies = (
        "vfs copies every image for each container"
        if engine_facts["storage"] == "vfs"
        else ""
    )
    yield _judge("storage", copies, engine_facts["storage"], "give the engine overlay2")
    yield _check_images(client)
    yield _check_registry(client)


def _check_images(client: docker.DockerClient) -> HostCheck:
    wanted = present_names(client)
    # A run needs only these two: the images below them may have been pruned.
    needed = {"device": wanted.device, "shaper": wanted.shaper}
    lacking = ", ".join(
        kind for kind, tag in needed.items() if not image_exists(client, tag)
    )
    unbuilt = f"not built yet: {lacking}" if lacking else ""
    return _judge(
        "images",
        unbuilt,
        f"{wanted.device}, {wanted.shaper}",
        "'testbed setup images', or the first run does",
    )


def _check_registry(client: docker.DockerClient) -> HostCheck:
    if not refusal_within(
        _REGISTRY_PATIENCE, lambda: client.images.get_registry_data(REGISTRY_BASE)
    ):
        return HostCheck("registry", "ok", f"has {REGISTRY_BASE}")
    if shutil.which("mmdebstrap"):
        return HostCheck(
            "registry", "ok", "none reachable; mmdebstrap makes the base image"
        )
    help_ = "apt-get install mmdebstrap makes the base image instead (as root the first run does that itself)"
    return HostCheck("registry", "missing", "none reachable", help_)


def _check_links(client: docker.DockerClient, image: str) -> Iterator[HostCheck]:
    """Try all backends and the gate in a container like the shaper's, in a separate network namespace."""
    if not image_exists(client, image):
        yield HostCheck(
            "links",
            "unknown",
            "the shaper's image is not built yet",
            "run 'testbed setup images' and repeat the check",
        )
        return
    backends = []
    for name in LINK_BACKENDS:
        try:
            LINK_BACKENDS.find(name)
            backends.append(name)
        except InputError as error:
            yield HostCheck(
                f"links: {name}",
                "missing",
                error.text,
                "install a compatible version of the package",
            )
    try:
        printed = capability.in_shaper(
            client, image, ["python3", "-c", _TRY_LINKS], backends
        )
        problems: dict[str, str] = json.loads(printed)
    except (HostError, APIError) as error:
        text = (
            f"the test container failed: {getattr(error, 'explanation', None) or error}"
        )
        yield HostCheck("links", "missing", text, "see the engine's log", needed=True)
        return
    for name, problem in problems.items():
        works = (
            "senders of radio cells and broadcasts take turns"
            if name == "gate"
            else "works on this kernel"
        )
        yield HostCheck(
            f"links: {name}",
            "missing" if problem else "ok",
            problem or works,
            MODULES_HELP,
        )
    if all(problem for name, problem in problems.items() if name != "gate"):
        yield HostCheck(
            "links",
            "missing",
            "no backend works",
            f"a kernel with {MODULES}: {MODULES_HELP}",
            needed=True,
        )


def _check_shaper(client: docker.DockerClient, image: str) -> HostCheck:
    """Start a shaper as a run does, and send a request to its published port."""
    state = RunState(new_id("doctor"), secrets.token_urlsafe(24), lease=_SHAPER_LEASE)
    try:
        make_control_network(client, state.run)
        make_container(client, state.run, SHAPER, shaper_settings(state, image, "auto"))
        url = look(
            client, state.run, SHAPER, "", lambda _name, found: published_url(found)
        ).control_url
        Health(client, state.run, {}).wait_for({SHAPER: url}, published=True)
        shaper = Shaper(url, state.token_of(SHAPER))
        clock = EngineClock(lambda: float(shaper.facts()["monotonic"]))
    except HostError as error:
        return HostCheck("shaper", "missing", str(error), needed=True)
    finally:
        remove_run(client, state.run, settle=False)
    other = (
        "; the engine's machine has another clock, so times are converted"
        if clock.is_other
        else ""
    )
    return HostCheck(
        "shaper", "ok", f"starts and responds at its published port{other}"
    )


def _check_host(client: docker.DockerClient | None) -> Iterator[HostCheck]:
    machine = facts(client) if client else {}
    cores = machine.get("cores") or os.cpu_count() or 1
    few = "1" if cores < 2 else ""
    yield _judge(
        "processors",
        few,
        str(cores),
        "use at least two: the shaper must not wait for the devices",
    )
    memory = machine.get("memory") or os.sysconf("SC_PHYS_PAGES") * os.sysconf(
        "SC_PAGE_SIZE"
    )
    yield HostCheck("memory", "ok", f"{memory / 2**30:.1f} GiB")
    folder = image_folder(client.info()) if client else Path("/var/lib")
    if folder.is_dir():
        free = shutil.disk_usage(folder).free
        room = _ROOM_WITH_CUDA if os.environ.get("TESTBED_TORCH") == "cuda" else _ROOM
        status: CheckStatus = "ok" if free > room else "missing"
        yield HostCheck(
            "disk",
            status,
            f"{free / 1e9:.0f} GB free for images",
            f"make room: {room / 1e9:.0f} GB",
        )
    unbootable = (
        "" if shutil.which("qemu-system-x86_64") else "needed only by netem tests"
    )
    yield _judge(
        "qemu",
        unbootable,
        "tests can boot a kernel with sch_netem",
        "apt-get install qemu-system-x86",
    )
