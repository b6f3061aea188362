"""What this machine can serve: what the testbed needs, whether it is there, and what helps where it is not."""

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
from testbed_controller.lab.containers import look, make_container, published_url, shaper_settings
from testbed_controller.lab.engine import connect, facts, lab_problem, may_start, refusal_within
from testbed_controller.lab.engineaddress import EngineAddress, chosen_engine
from testbed_controller.lab.health import Health
from testbed_controller.lab.images import REGISTRY_BASE, exists, image_folder, present_names
from testbed_controller.lab.networks import make_control_network
from testbed_controller.lab.removal import remove_run
from testbed_controller.lab.runstate import RunState, new_id
from testbed_controller.shaping.backend import LINK_BACKENDS
from testbed_controller.shaping.backends import MODULES, MODULES_HELP
from testbed_controller.shaping.capability import DEVICE_RATE

CheckStatus = Literal["ok", "missing", "unknown"]

_REGISTRY_PATIENCE = 5.0
_ROOM = 6 * 10**9
"""Bytes: the images take half of it, and twice as much while they are built."""
_ROOM_WITH_CUDA = 16 * 10**9
_SHAPER_LEASE = 120.0
"""Seconds after which the shaper that is tried ends, whoever else has."""
_TRY_LINKS = (
    "import json, os; from testbed_controller.shaping.backend import adopt; "
    "from testbed_controller.shaping.backends import backend_problems; "
    "adopt(os.environ); print(json.dumps(backend_problems()))"
)


@dataclass(frozen=True)
class HostCheck:
    """One thing, whether it is there, and what to do where it is not."""

    name: str
    status: CheckStatus
    detail: str
    help: str = ""
    needed: bool = False
    """Without it no scenario can run in containers (all run with `--runtime simulate`)."""


def examine(*, measure: bool = False) -> Iterator[HostCheck]:
    """Yield the checks one by one, as each is done; changes nothing on the machine.

    With ``measure`` it also says how fast and how short links can be here, some seconds for each backend, and keeps
    that for `testbed run`, which then refuses faster links before it makes any container.
    """
    yield _python()
    connected = _connected()
    if isinstance(connected, HostCheck):
        yield connected
        yield from _host(None)
        return
    client, engine = connected
    yield from _engine(client, engine)
    usable = lab_problem(client, engine) is None
    image = present_names(client).shaper
    backends = list(_links(client, image)) if usable else []
    yield from backends
    if usable and exists(client, image) and not any(check.needed for check in backends):
        yield _shaper(client, image)
    yield from _host(client)
    if measure:
        for backend in LINK_BACKENDS:
            if any(_works(check, backend) for check in backends):
                yield _measured(client, backend)


def _connected() -> tuple[docker.DockerClient, EngineAddress] | HostCheck:
    """Return a client of the engine in use, or the check that says why there is none."""
    try:
        engine = chosen_engine()
    except HostError as error:
        return HostCheck("engine", "missing", "the current docker context is unknown", str(error), needed=True)
    try:
        return connect(engine), engine
    except HostError as error:
        startable = may_start(engine) and shutil.which("apt-get") is not None
        help_ = "'testbed setup images' as root installs and starts one" if startable else str(error)
        return HostCheck("engine", "missing", "none answers", help_, needed=not startable)


def _works(check: HostCheck, backend: str) -> bool:
    return check.name == f"links: {backend}" and check.status == "ok"


def _measured(client: docker.DockerClient, backend: str) -> HostCheck:
    name = f"links: how far, {backend}"
    try:
        found = capability.measure(client, backend)
    except HostError as error:
        return HostCheck(name, "unknown", str(error), "try again on an idle machine")
    if found.rate is None or found.delay is None:
        return HostCheck(name, "missing", "no link kept its tolerance", "an idle machine, or one with more processors")
    detail = f"up to {format_rate(found.rate)}, from {format_duration(found.delay)} on"
    if found.devices is not None and found.packet_cost is not None:
        detail += (
            f"; about {found.devices} devices that each send {format_rate(DEVICE_RATE)} without a pause "
            f"({found.packet_cost * 1e6:.0f} us of a processor a packet)"
        )
    return HostCheck(name, "ok", detail)


def _judged(name: str, lacking: str, fine: str, helps: str, *, needed: bool = False) -> HostCheck:
    """Return what is ``lacking``, with what helps; that all is ``fine`` where nothing is."""
    return HostCheck(name, "missing", lacking, helps, needed) if lacking else HostCheck(name, "ok", fine, needed=needed)


def _python() -> HostCheck:
    lacking = [name for name in ("torch", "docker", "flask", "safetensors") if importlib.util.find_spec(name) is None]
    version = platform.python_version()
    without = f"{version} without {', '.join(lacking)}" if lacking else ""
    helps = "install them by pip, or in a checkout by 'make environment'"
    return _judged("python", without, f"{version} in {sys.prefix}", helps, needed=bool(lacking))


def _engine(client: docker.DockerClient, engine: EngineAddress) -> Iterator[HostCheck]:
    known = facts(client)
    cgroup, at = known["cgroup"], f" at {engine.title}" if engine.chosen else ""
    fine = f"{known['name']} {known['version']} (API {known['api']}) on {known['system']}{at}"
    reason, remedy = lab_problem(client, engine) or ("", "")
    yield _judged("engine", reason, fine, remedy, needed=True)
    yield HostCheck("kernel", "ok", f"{known['kernel']}, {known['architecture']}")
    without = f"{cgroup} without limits on {', '.join(known['unlimited'])}" if known["unlimited"] else ""
    helps = "boot with cgroup_enable=memory, or use cgroup v2: limits of devices are ignored without"
    yield _judged("cgroup", without, f"{cgroup} with limits on memory and processes", helps)
    copies = "vfs copies every image for each container" if known["storage"] == "vfs" else ""
    yield _judged("storage", copies, known["storage"], "give the engine overlay2")
    yield _images(client)
    yield _registry(client)


def _images(client: docker.DockerClient) -> HostCheck:
    wanted = present_names(client)
    # A run needs no other ones: those below may have been pruned, or another host may have brought these.
    needed = {"device": wanted.device, "shaper": wanted.shaper}
    lacking = ", ".join(kind for kind, tag in needed.items() if not exists(client, tag))
    unbuilt = f"not built yet: {lacking}" if lacking else ""
    return _judged(
        "images", unbuilt, f"{wanted.device}, {wanted.shaper}", "'testbed setup images', or the first run does"
    )


def _registry(client: docker.DockerClient) -> HostCheck:
    if not refusal_within(_REGISTRY_PATIENCE, lambda: client.images.get_registry_data(REGISTRY_BASE)):
        return HostCheck("registry", "ok", f"has {REGISTRY_BASE}")
    if shutil.which("mmdebstrap"):
        return HostCheck("registry", "ok", "none reachable; mmdebstrap makes the base image")
    help_ = "apt-get install mmdebstrap makes the base image instead (as root the first run does that itself)"
    return HostCheck("registry", "missing", "none reachable", help_)


def _links(client: docker.DockerClient, image: str) -> Iterator[HostCheck]:
    """Try all backends and the gate in a container like the shaper's, in a network namespace of their own."""
    if not exists(client, image):
        yield HostCheck(
            "links", "unknown", "the shaper's image is not built yet", "'testbed setup images', then ask again"
        )
        return
    backends = []
    for name in LINK_BACKENDS:
        try:
            LINK_BACKENDS.find(name)
            backends.append(name)
        except InputError as error:
            yield HostCheck(f"links: {name}", "missing", error.text, "install a version of the package that works here")
    try:
        printed = capability.in_shaper(client, image, ["python3", "-c", _TRY_LINKS], backends)
        found: dict[str, str] = json.loads(printed)
    except (HostError, APIError) as error:
        text = f"nothing could be tried in a container: {getattr(error, 'explanation', None) or error}"
        yield HostCheck("links", "missing", text, "see what the engine says of that, in its log", needed=True)
        return
    for name, problem in found.items():
        works = "radio cells and casts take turns at their senders" if name == "gate" else "works on this kernel"
        yield HostCheck(f"links: {name}", "missing" if problem else "ok", problem or works, MODULES_HELP)
    if all(problem for name, problem in found.items() if name != "gate"):
        yield HostCheck("links", "missing", "no backend works", f"a kernel with {MODULES}: {MODULES_HELP}", needed=True)


def _shaper(client: docker.DockerClient, image: str) -> HostCheck:
    """Start a shaper as a run does, and ask it at its published port."""
    state = RunState(new_id("doctor"), secrets.token_urlsafe(24), lease=_SHAPER_LEASE)
    try:
        make_control_network(client, state.run)
        make_container(client, state.run, SHAPER, shaper_settings(state, image, "auto"))
        url = look(client, state.run, SHAPER, "", lambda _name, found: published_url(found)).control_url
        Health(client, state.run, {}).wait_for({SHAPER: url}, published=True)
        shaper = Shaper(url, state.token_of(SHAPER))
        clock = EngineClock(lambda: float(shaper.facts()["monotonic"]))
    except HostError as error:
        return HostCheck("shaper", "missing", str(error), needed=True)
    finally:
        remove_run(client, state.run, settle=False)
    other = "; the engine's machine has a clock of its own, to which times are converted" if clock.is_other else ""
    return HostCheck("shaper", "ok", f"starts, and answers at its published port{other}")


def _host(client: docker.DockerClient | None) -> Iterator[HostCheck]:
    machine = facts(client) if client else {}
    cores = machine.get("cores") or os.cpu_count() or 1
    few = "1" if cores < 2 else ""
    yield _judged("processors", few, str(cores), "two at least: the shaper must not wait for the devices")
    memory = machine.get("memory") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield HostCheck("memory", "ok", f"{memory / 2**30:.1f} GiB")
    folder = image_folder(client.info()) if client else Path("/var/lib")
    if folder.is_dir():
        free = shutil.disk_usage(folder).free
        room = _ROOM_WITH_CUDA if os.environ.get("TESTBED_TORCH") == "cuda" else _ROOM
        status: CheckStatus = "ok" if free > room else "missing"
        yield HostCheck("disk", status, f"{free / 1e9:.0f} GB free for images", f"make room: {room / 1e9:.0f} GB")
    unbootable = "" if shutil.which("qemu-system-x86_64") else "only tests of netem want it"
    yield _judged("qemu", unbootable, "tests can boot a kernel with sch_netem", "apt-get install qemu-system-x86")
