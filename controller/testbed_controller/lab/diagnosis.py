"""Requirements of the testbed on this machine: checks and remedies."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import docker
from docker.errors import APIError

from testbed.common.errors import HostError, InputError
from testbed.common.quantities import format_duration, format_rate
from testbed.network.checks import SHAPER
from testbed_controller.lab import capability
from testbed_controller.lab.clients import Shaper
from testbed_controller.lab.clocks import EngineClock
from testbed_controller.lab.containers import (
    inspect,
    make_container,
    published_url,
    shaper_settings,
)
from testbed_controller.lab.engine import (
    can_start_engine,
    connect,
    describe_refusal_within,
    facts,
    lab_problem,
)
from testbed_controller.lab.engineaddress import EngineAddress, chosen_engine
from testbed_controller.lab.health import Health
from testbed_controller.lab.images import (
    REGISTRY_BASE,
    find_tags,
    image_exists,
    image_folder,
)
from testbed_controller.lab.networks import make_control_network
from testbed_controller.lab.removal import remove_run
from testbed_controller.lab.runstate import RunState, new_id
from testbed_controller.shaping.backend import LINK_BACKENDS
from testbed_controller.shaping.backends import MODULES, MODULES_HELP
from testbed_controller.shaping.capability import DEVICE_RATE

CheckStatus = Literal["ok", "missing", "unknown"]

_REGISTRY_SECONDS = 5.0
"""Time for a registry to answer, in seconds."""
_IMAGE_SPACE = 6 * 10**9
"""Disk space needed for images in bytes: building them takes all of it, and the images take half of it."""
_IMAGE_SPACE_WITH_CUDA = 16 * 10**9
"""Disk space needed for images with CUDA's libraries, in bytes."""
_SHAPER_LEASE = 120.0
"""Lease of the test shaper in seconds."""
_TEST_LINKS = (
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
    """Whether runs in containers require the check to succeed; `--runtime simulate` requires no check."""


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
    is_usable = lab_problem(client, engine) is None
    image = find_tags(client).shaper
    checks = list(_check_links(client, image)) if is_usable else []
    yield from checks
    # The shaper is not started after a failed check of the links, since it cannot work either.
    have_failed = any(check.needed for check in checks)
    if is_usable and image_exists(client, image) and not have_failed:
        yield _check_shaper(client, image)
    yield from _check_host(client)
    if measure:
        for backend in _working_backends(checks):
            yield _measure_capacity(client, backend)


def _check_connection() -> tuple[docker.DockerClient, EngineAddress] | HostCheck:
    """Return a client of the chosen engine, or a failed check."""
    try:
        engine = chosen_engine()
    except HostError as error:
        detail = "the current docker context is unknown"
        return HostCheck("engine", "missing", detail, str(error), needed=True)
    try:
        return connect(engine), engine
    except HostError as error:
        is_startable = can_start_engine(engine) and shutil.which("apt-get") is not None
        remedy = str(error)
        if is_startable:
            remedy = "'testbed setup images' as root installs and starts one"
        return HostCheck(
            "engine", "missing", "no engine responds", remedy, needed=not is_startable
        )


def _working_backends(checks: Iterable[HostCheck]) -> list[str]:
    """Return the backends whose check, named ``links: NAME``, has succeeded."""
    successes = {check.name for check in checks if check.status == "ok"}
    return [name for name in LINK_BACKENDS if f"links: {name}" in successes]


def _measure_capacity(client: docker.DockerClient, backend: str) -> HostCheck:
    name = f"link capacity: {backend}"
    try:
        measured = capability.measure(client, backend)
    except HostError as error:
        return HostCheck(name, "unknown", str(error), "try again on an idle machine")
    if measured.rate is None or measured.delay is None:
        detail = "no link within its tolerance"
        remedy = "use an idle machine or more processors"
        return HostCheck(name, "missing", detail, remedy)
    rate = format_rate(measured.rate)
    detail = f"rates up to {rate}, delays from {format_duration(measured.delay)}"
    if measured.devices is not None and measured.packet_cost is not None:
        detail += (
            f"; about {measured.devices} devices that each send {format_rate(DEVICE_RATE)} continuously "
            f"({measured.packet_cost * 1e6:.0f} us of processor time for a packet)"
        )
    return HostCheck(name, "ok", detail)


def _make_check(
    name: str, problem: str, success: str, remedy: str, *, needed: bool = False
) -> HostCheck:
    """Return a failed check with a remedy if ``problem`` is not empty, otherwise a successful check."""
    if problem:
        return HostCheck(name, "missing", problem, remedy, needed)
    return HostCheck(name, "ok", success, needed=needed)


def _check_python() -> HostCheck:
    missing = []
    for name in ("torch", "docker", "flask", "safetensors"):
        if importlib.util.find_spec(name) is None:
            missing.append(name)
    version = platform.python_version()
    problem = f"{version} without {', '.join(missing)}" if missing else ""
    success = f"{version} in {sys.prefix}"
    remedy = "install them with pip, or in a checkout with 'make environment'"
    return _make_check("python", problem, success, remedy, needed=bool(missing))


def _check_engine(
    client: docker.DockerClient, engine: EngineAddress
) -> Iterator[HostCheck]:
    properties = facts(client)
    description = "{name} {version} (API {api}) on {system}".format_map(properties)
    if engine.chosen:
        description += f" at {engine.title}"
    reason, remedy = lab_problem(client, engine) or ("", "")
    yield _make_check("engine", reason, description, remedy, needed=True)
    kernel = "{kernel}, {architecture}".format_map(properties)
    yield HostCheck("kernel", "ok", kernel)
    yield _check_cgroup(properties)
    storage_problem = ""
    if properties["storage"] == "vfs":
        storage_problem = "vfs copies every image for each container"
    remedy = "configure the engine with the storage driver overlay2"
    yield _make_check("storage", storage_problem, properties["storage"], remedy)
    yield _check_images(client)
    yield _check_registry(client)


def _check_cgroup(properties: Mapping[str, Any]) -> HostCheck:
    cgroup = properties["cgroup"]
    problem = ""
    if properties["unlimited"]:
        problem = f"{cgroup} without limits on {', '.join(properties['unlimited'])}"
    remedy = "boot with cgroup_enable=memory, or use cgroup v2; otherwise device limits are ignored"
    success = f"{cgroup} with limits on memory and processes"
    return _make_check("cgroup", problem, success, remedy)


def _check_images(client: docker.DockerClient) -> HostCheck:
    tags = find_tags(client)
    # A run needs only these two images. The images on which they were built may be missing.
    needed = {"device": tags.device, "shaper": tags.shaper}
    missing = []
    for kind, tag in needed.items():
        if not image_exists(client, tag):
            missing.append(kind)
    unbuilt = f"not built yet: {', '.join(missing)}" if missing else ""
    success = f"{tags.device}, {tags.shaper}"
    remedy = "run 'testbed setup images'; otherwise the first run builds them"
    return _make_check("images", unbuilt, success, remedy)


def _check_registry(client: docker.DockerClient) -> HostCheck:
    ask = partial(client.images.get_registry_data, REGISTRY_BASE)
    if not describe_refusal_within(_REGISTRY_SECONDS, ask):
        return HostCheck("registry", "ok", f"has {REGISTRY_BASE}")
    if shutil.which("mmdebstrap"):
        detail = "none reachable; mmdebstrap makes the base image"
        return HostCheck("registry", "ok", detail)
    remedy = (
        "install mmdebstrap, which makes the base image instead: 'apt-get install mmdebstrap' "
        "(as root, the first run installs it)"
    )
    return HostCheck("registry", "missing", "none reachable", remedy)


def _check_links(client: docker.DockerClient, image: str) -> Iterator[HostCheck]:
    """Try all backends and the gate in a container like the shaper's, in a separate network namespace."""
    if not image_exists(client, image):
        detail = "the shaper's image is not built yet"
        remedy = "run 'testbed setup images' and repeat the check"
        yield HostCheck("links", "unknown", detail, remedy)
        return
    backends = []
    for name in LINK_BACKENDS:
        try:
            LINK_BACKENDS.find(name)
            backends.append(name)
        except InputError as error:
            remedy = "install a compatible version of the package"
            yield HostCheck(f"links: {name}", "missing", error.text, remedy)
    try:
        program = ["python3", "-c", _TEST_LINKS]
        printed = capability.run_in_shaper_image(client, image, program, backends)
        problems: dict[str, str] = json.loads(printed)
    except (HostError, APIError) as error:
        reason = getattr(error, "explanation", None) or error
        text = f"the test container failed: {reason}"
        yield HostCheck("links", "missing", text, "see the engine's log", needed=True)
        return
    yield from _check_backends(problems)


def _check_backends(problems: Mapping[str, str]) -> Iterator[HostCheck]:
    """Yield a check of each backend and of the gate, and a failed one if no backend works."""
    is_usable = False
    for name, problem in problems.items():
        success = "works on this kernel"
        if name == "gate":
            success = "senders of radio cells and broadcasts take turns"
        elif not problem:
            is_usable = True
        status: CheckStatus = "missing" if problem else "ok"
        yield HostCheck(f"links: {name}", status, problem or success, MODULES_HELP)
    if not is_usable:
        remedy = f"use a kernel with {MODULES}: {MODULES_HELP}"
        yield HostCheck("links", "missing", "no backend works", remedy, needed=True)


def _check_shaper(client: docker.DockerClient, image: str) -> HostCheck:
    """Start a shaper as a run does, and send a request to its published port."""
    state = RunState(new_id("doctor"), secrets.token_urlsafe(24), lease=_SHAPER_LEASE)
    try:
        make_control_network(client, state.run)
        make_container(client, state.run, SHAPER, shaper_settings(state, image, "auto"))
        shaper_container = inspect(
            client, state.run, SHAPER, "", lambda _name, answer: published_url(answer)
        )
        url = shaper_container.control_url
        Health(client, state.run, {}).wait_for({SHAPER: url}, published=True)
        shaper = Shaper(url, state.token_of(SHAPER))
        clock = EngineClock(lambda: float(shaper.facts()["monotonic"]))
    except HostError as error:
        return HostCheck("shaper", "missing", str(error), needed=True)
    finally:
        remove_run(client, state.run, recheck=False)
    detail = "starts and responds at its published port"
    if clock.has_offset:
        detail += "; the engine's machine has another clock, so times are converted"
    return HostCheck("shaper", "ok", detail)


def _check_host(client: docker.DockerClient | None) -> Iterator[HostCheck]:
    machine = facts(client) if client else {}
    cores = machine.get("cores") or os.cpu_count() or 1
    problem = "1" if cores < 2 else ""
    remedy = "use at least two: the shaper must not wait for the devices"
    yield _make_check("processors", problem, str(cores), remedy)
    # The memory of the engine counts, if one responds: an engine in a virtual machine has less than this machine.
    own_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = machine.get("memory") or own_memory
    yield HostCheck("memory", "ok", f"{memory / 2**30:.1f} GiB")
    folder = image_folder(client.info()) if client else Path("/var/lib")
    # The folder of an engine in a virtual machine does not exist on this machine.
    if folder.is_dir():
        yield _check_disk(folder)
    has_qemu = shutil.which("qemu-system-x86_64") is not None
    problem = "" if has_qemu else "needed only by netem tests"
    success = "tests can boot a kernel with sch_netem"
    yield _make_check("qemu", problem, success, "apt-get install qemu-system-x86")


def _check_disk(folder: Path) -> HostCheck:
    free = shutil.disk_usage(folder).free
    needed_space = _IMAGE_SPACE
    if os.environ.get("TESTBED_TORCH") == "cuda":
        needed_space = _IMAGE_SPACE_WITH_CUDA
    status: CheckStatus = "ok" if free > needed_space else "missing"
    detail = f"{free / 1e9:.0f} GB free for images"
    return HostCheck("disk", status, detail, f"free {needed_space / 1e9:.0f} GB")
