"""A run's devices and shaper as containers, on two networks: made, found again, broken and removed."""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cached_property
from ipaddress import IPv4Network
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

import docker
from docker.errors import APIError, NotFound
from docker.types import IPAMConfig, IPAMPool, LogConfig, Mount

from controller.lab import runstate
from controller.lab.addresses import DEFAULT_RANGE, device_addresses, free_subnets, host_routes
from controller.lab.engine import connect, ensure_engine, facts, is_local
from controller.lab.images import Images, ensure_images
from controller.lab.removal import DEVICE, ROLE, RUN, labelled_runs, remove_run
from testbed.errors import HostError, InputError, TestbedError
from testbed.experiment import Experiment
from testbed.hardware import DeviceSpec
from testbed.network.link import Link, Pair
from testbed.quantities import format_size
from testbed.scenario.trial import Trial

if TYPE_CHECKING:
    from controller.lab.agents import Agent
    from controller.lab.links import Shaper

CONTROL_PORT = 8700
SHAPER = "shaper"

HEALTH_PATIENCE = 60.0
"""Seconds for a container to answer; many starting at once on few processors take their time."""
HEALTH_INTERVAL = 0.04
KILLED = 137
"""The status of what SIGKILL has ended."""
KILL_NOTED = 0.5
"""Seconds within which the engine's events have a kill."""
LOOK_INTERVAL = 0.5
"""Seconds between two questions for health, and for signs of life: on a busy host, asking costs what is asked for."""
WORKERS = max(4, 2 * (os.cpu_count() or 1))
"""Containers made at once: more only queue up inside the engine."""
MINIMAL_MEMORY = 32 * 2**20
"""Bytes; in less the agent does not even start (an idle one needs some 25 MB, one with torch some 200 MB more)."""

SHAPER_CAPABILITIES = ["NET_ADMIN", "NET_RAW", "SYS_ADMIN", "SYS_PTRACE", "SYS_NICE"]
"""To configure networks, to enter the devices' namespaces (two of them), and to be scheduled in time."""

_SYSCTLS = {
    # A link that idles between two batches would else start slowly again, which is no property of the link.
    "net.ipv4.tcp_slow_start_after_idle": "0",
    # Windows large enough for 1 Gbit/s over 100 ms each way: the usual 6 MB, and not the link, would set the pace.
    "net.ipv4.tcp_rmem": "4096 131072 67108864",
    "net.ipv4.tcp_wmem": "4096 16384 67108864",
}

_LOGS = LogConfig(type=LogConfig.types.JSON, config={"max-size": "10m", "max-file": "2"})
_NAMES_KEPT_FOR_US = {SHAPER, "control", "data"}

Progress = Callable[[str], None]


@dataclass(frozen=True)
class DeviceContainer:
    """A device's container as last seen."""

    name: str
    id: str
    address: str
    """On the data network; the same for the whole run."""
    state: str
    """The engine's word: created, running, paused, exited; or gone."""
    pid: int = 0
    """In the engine's process namespace; 0 when it does not run."""
    control_url: str = ""
    """Reachable from the controller only; another one after each start, empty when it does not run."""


class Lab:
    """The containers and networks of one run."""

    def __init__(
        self, client: docker.DockerClient, state: runstate.RunState, trial: Trial, subnet: IPv4Network
    ) -> None:
        self._client = client
        self._state = state
        self.trial = trial
        self.experiment = trial.experiment
        self.subnet = subnet
        self.devices: dict[str, DeviceContainer] = {}
        self._shaper_url = ""
        self._agents: dict[str, tuple[str, Agent]] = {}
        self.images: Images | None = None

    # Making and finding

    @staticmethod
    def new_run_id(scenario: str) -> str:
        """Return an id that no other run has."""
        return f"{scenario}-{secrets.token_hex(4)}"

    @classmethod
    def create(cls, trial: Trial, run_id: str | None = None, progress: Progress | None = None) -> Lab:
        """Make networks, shaper and devices; return when all are healthy and every link is shaped.

        Leaves nothing behind when it fails or is interrupted.

        Raises:
            HostError: no engine, no images, no room for the networks, or a container does not come up.
            InputError: the scenario's subnet does not fit.

        """
        say = progress or (lambda _text: None)
        _check_devices(trial.experiment)
        client = ensure_engine(say)
        if not is_local():
            raise HostError(
                "DOCKER_HOST is another machine, whose loopback ports cannot be reached from here: "
                "run testbed there, or forward its engine and ports with ssh"
            )
        images = ensure_images(client, say)
        scenario = trial.scenario
        state = runstate.RunState(
            run=run_id or cls.new_run_id(scenario.name),
            token=secrets.token_urlsafe(24),
            controller=os.getpid(),
            created=time.time(),
            scenario=scenario.model_dump(mode="json", by_alias=True, exclude_none=True),
            point=trial.point,
            repetition=trial.repetition,
        )
        runstate.write(state)
        try:
            say("making the networks")
            subnet = _make_networks(client, state.run, scenario.network.subnet, len(trial.experiment.devices))
            lab = cls(client, state, trial, subnet)
            lab.images = images
            lab._populate(images, say)
        except BaseException:
            with contextlib.suppress(TestbedError):  # the first error tells more than one of clearing up
                remove_run(client, state.run)
            raise
        return lab

    @classmethod
    def open(cls, run_id: str) -> Lab:
        """Find a run that is up, from whichever process.

        Raises:
            InputError: there is no such run.
            HostError: no engine answers.

        """
        from testbed.scenario.expand import trials
        from testbed.scenario.schema import Scenario

        state = runstate.read(run_id)
        client = connect()
        trial = trials(Scenario.model_validate(state.scenario))[0]
        trial = replace(trial, point=state.point, repetition=state.repetition)
        try:
            network = client.api.inspect_network(_network_name(run_id, "data"))
        except NotFound:
            raise InputError(
                f"the run '{run_id}' has no network any more: remove it with 'testbed down {run_id}'"
            ) from None
        lab = cls(client, state, trial, IPv4Network(network["IPAM"]["Config"][0]["Subnet"]))
        lab.refresh()
        return lab

    @property
    def run_id(self) -> str:
        """The run's id, which all its labels carry."""
        return self._state.run

    @property
    def token(self) -> str:
        """The secret that agents and shaper of this run ask for."""
        return self._state.token

    @property
    def broadcast(self) -> str:
        """The data network's broadcast address."""
        return str(self.subnet.broadcast_address)

    def refresh(self) -> None:
        """Look again what every container of the run is doing; one that has vanished is in state `gone`."""
        addresses = device_addresses(self.subnet, [device.name for device in self.experiment.devices])
        for name, address in addresses.items():
            self.devices[name] = self._look(name, str(address))
        with contextlib.suppress(NotFound):
            self._shaper_url = control_url(self._client.api.inspect_container(container_name(self.run_id, SHAPER)))

    def facts(self) -> dict[str, Any]:
        """Return what a run's manifest should say of the engine, the images and the link backend."""
        images = {}
        if self.images is not None:
            images = {tag: str(self._client.images.get(tag).id) for tag in (self.images.device, self.images.shaper)}
        return {"engine": asdict(facts(self._client)), "images": images, "shaper": self.shaper.facts()}

    # Talking

    @cached_property
    def shaper(self) -> Shaper:
        """The client of the run's shaper."""
        from controller.lab.links import Shaper

        return Shaper(self._shaper_url, self.token)

    def agent(self, name: str) -> Agent:
        """Return the client of a device's agent at the port that it has now."""
        from controller.lab.agents import Agent

        url = self._device(name).control_url
        if not url:
            raise TestbedError(f"{name} is {self.devices[name].state}: nothing answers for it")
        known = self._agents.get(name)
        if known is None or known[0] != url:
            known = self._agents[name] = (url, Agent(url, self.token, name))
        return known[1]

    def logs(self, name: str, *, follow: bool = False) -> Iterator[bytes]:
        """Yield what a device (or `shaper`) has written; see `container_logs`."""
        return container_logs(self._client, self.run_id, name, follow=follow)

    @contextlib.contextmanager
    def watch_starts(self) -> Iterator[Iterator[str]]:
        """Within the block, yield the name of each device whose container starts, whoever started it."""
        filters = {"type": "container", "event": "start", "label": [f"{RUN}={self.run_id}", DEVICE]}
        stream = self._client.events(decode=True, filters=filters)
        try:
            yield (str(event["Actor"]["Attributes"][DEVICE]) for event in stream)
        finally:
            stream.close()

    # Breaking and mending

    def kill(self, name: str) -> None:
        """End the device's container at once, as a power cut would; nothing happens when it is down already."""
        device = self._device(name)
        with _unless(409, 404):
            self._client.api.kill(device.id, "SIGKILL")
        with _unless(404):
            self._client.api.wait(device.id, timeout=30)
        self.devices[name] = self._look(name, device.address)

    def start(self, name: str, links: Mapping[Pair, Link] | None = None) -> None:
        """Boot the device again; return when its links are shaped and its agent is healthy.

        Its links are as they were last set, with whatever faults are in force; ``links`` changes them before.
        """
        device = self._device(name)
        try:
            self._client.api.start(device.id)
        except NotFound:
            raise TestbedError(f"the container of {name} is gone: it cannot be started again") from None
        except APIError as error:
            raise HostError(f"{name} cannot be started: {error.explanation}") from error
        self.devices[name] = device = self._look(name, device.address)
        self._attach([device], links or {})
        self._await_health({name: device.control_url})

    def _attach(self, devices: Iterable[DeviceContainer], links: Mapping[Pair, Link]) -> None:
        """Have these devices' interfaces shaped."""
        from controller.lab.links import Endpoint

        specs = {spec.name: spec for spec in self.experiment.devices}
        endpoints = [
            Endpoint(each.name, each.pid, each.address, specs[each.name].uplink, specs[each.name].downlink)
            for each in devices
        ]
        self.shaper.attach(endpoints, links, self.experiment.seed, self.experiment.cells)

    def pause(self, name: str) -> None:
        """Freeze every process of the device; packets still reach its kernel."""
        device = self._device(name)
        with _unless(409):
            self._client.api.pause(device.id)
        self.devices[name] = self._look(name, device.address)

    def resume(self, name: str) -> None:
        """Let a paused device go on."""
        device = self._device(name)
        with _unless(409, 500):  # 500: 'is not paused', in older engines
            self._client.api.unpause(device.id)
        self.devices[name] = self._look(name, device.address)

    def down(self) -> int:
        """Remove everything of the run, whatever is left of it; return how many containers and networks there were."""
        return remove_run(self._client, self.run_id, settle=False)

    # Inside

    def _device(self, name: str) -> DeviceContainer:
        try:
            return self.devices[name]
        except KeyError:
            raise InputError(f"there is no device '{name}' in {self.run_id}: {', '.join(self.devices)}") from None

    def _look(self, name: str, address: str) -> DeviceContainer:
        try:
            found = self._client.api.inspect_container(container_name(self.run_id, name))
        except NotFound:
            return DeviceContainer(name, container_name(self.run_id, name), address, "gone")
        status = found["State"]
        return DeviceContainer(name, found["Id"], address, status["Status"], status["Pid"], control_url(found))

    def _populate(self, images: Images, say: Progress) -> None:
        """Make and start all containers, shape the links as soon as every device has its network, await health."""
        specs = self.experiment.devices
        say(f"starting {len(specs)} devices and the shaper")
        addresses = device_addresses(self.subnet, [spec.name for spec in specs])

        def launch(name: str, settings: dict[str, Any], address: str | None) -> DeviceContainer:
            self._make_container(name, settings, address)
            return self._look(name, address or "")

        pool = ThreadPoolExecutor(WORKERS, "lab")
        try:
            shaper = pool.submit(launch, SHAPER, self._shaper_settings(images), None)
            devices = [
                pool.submit(launch, spec.name, self._device_settings(images, spec), str(addresses[spec.name]))
                for spec in specs
            ]
            self._shaper_url = shaper.result().control_url
            self._await_health({SHAPER: self._shaper_url})
            self.devices = {device.name: device for device in _results(devices)}
        finally:
            # Requests under way are waited for, so that nothing appears after the clearing up.
            pool.shutdown(wait=True, cancel_futures=True)
        say("shaping the links")
        try:
            self._attach(self.devices.values(), self.experiment.links)
        except HostError:
            for name in self.devices:  # a device that has ended already is the better explanation
                self._check_alive(name)
            raise
        say("waiting for the devices")
        self._await_health({name: device.control_url for name, device in self.devices.items()})

    def _make_container(self, name: str, settings: dict[str, Any], address: str | None) -> None:
        """Create, connect and start one container. Its name is fixed: a request that is retried meets its first try."""
        api = self._client.api
        title = container_name(self.run_id, name)
        try:
            api.create_container(name=title, **settings)
        except APIError as error:
            if error.status_code != 409:
                raise HostError(f"the container of {name} cannot be made: {error.explanation}") from error
        try:
            if address is not None:
                api.connect_container_to_network(
                    title, _network_name(self.run_id, "data"), ipv4_address=address, aliases=[name]
                )
            api.start(title)
        except APIError as error:
            raise HostError(f"the container of {name} cannot be started: {error.explanation}") from error

    def _settings(self, image: str, labels: dict[str, str], environment: dict[str, str], **host: Any) -> dict[str, Any]:
        """Return what all containers have in common, ours locked down further by the caller."""
        return {
            "image": image,
            "labels": {RUN: self.run_id, **labels},
            "environment": {"TESTBED_RUN": self.run_id, "TESTBED_TOKEN": self.token, **environment},
            "ports": [CONTROL_PORT],
            "host_config": self._client.api.create_host_config(
                port_bindings={CONTROL_PORT: ("127.0.0.1", None)},
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                read_only=True,
                log_config=_LOGS,
                network_mode=_network_name(self.run_id, "control"),
                **host,
            ),
        }

    def _device_settings(self, images: Images, spec: DeviceSpec) -> dict[str, Any]:
        memory = int(spec.memory)
        settings = self._settings(
            images.device,
            {DEVICE: spec.name},
            {"TESTBED_DEVICE": spec.name, "OMP_NUM_THREADS": "1"},
            tmpfs={"/tmp": "size=64m,mode=1777"},
            mounts=[Mount("/state", None, type="volume", labels={RUN: self.run_id, DEVICE: spec.name})],
            mem_limit=memory,
            memswap_limit=memory,
            pids_limit=256,
            nano_cpus=None if spec.cpus is None else int(spec.cpus * 1e9),
            sysctls=_SYSCTLS,
        )
        return {**settings, "hostname": spec.name, "user": "device"}

    def _shaper_settings(self, images: Images) -> dict[str, Any]:
        return self._settings(
            images.shaper,
            {ROLE: SHAPER},
            {"TESTBED_LINKS": os.environ.get("TESTBED_LINKS", "")},
            tmpfs={"/tmp": "size=64m,mode=1777", "/run": "size=16m,mode=755"},
            cap_add=SHAPER_CAPABILITIES,
            pid_mode="host",
        )

    def _await_health(self, urls: Mapping[str, str]) -> None:
        waiting = dict(urls)
        began = looked = time.monotonic()
        while True:
            waiting = {name: url for name, url in waiting.items() if not healthy(url)}
            if not waiting:
                return
            now = time.monotonic()
            if now - looked > LOOK_INTERVAL:
                looked = now
                for name in waiting:
                    self._check_alive(name)
            if now - began > HEALTH_PATIENCE:
                self._give_up(next(iter(waiting)), f"does not answer within {HEALTH_PATIENCE:.0f} s")
            time.sleep(HEALTH_INTERVAL)

    def starved(self, name: str, patience: float = 0.0) -> str | None:
        """Say so where the kernel has ended a device since it needed more memory than it has.

        Waits for so many seconds at most for a container to end that still seems to run.
        """
        deadline = time.monotonic() + patience
        with contextlib.suppress(NotFound):
            while (status := self._ended(name)) is None and time.monotonic() < deadline:
                time.sleep(HEALTH_INTERVAL)
            return None if status is None else self._starvation(name, status)
        return None

    def _ended(self, name: str) -> dict[str, Any] | None:
        """Return how a container has ended, in the engine's words; None while it has not."""
        status: dict[str, Any] = self._client.api.inspect_container(container_name(self.run_id, name))["State"]
        return status if status["Status"] in ("exited", "dead") else None

    def _starvation(self, name: str, status: Mapping[str, Any]) -> str | None:
        """Say so where a device that has ended in this way did for want of memory."""
        limit = next((spec.memory for spec in self.experiment.devices if spec.name == name), None)
        if limit is None:
            return None
        starved = status.get("OOMKilled") or (status["ExitCode"] == KILLED and not self._was_killed(name, status))
        return _out_of_memory(name, limit) if starved else None

    def _was_killed(self, name: str, status: Mapping[str, Any]) -> bool:
        """Say whether somebody asked the engine to kill a device that has ended, rather than the kernel doing it.

        With cgroup v1 the engine misses most kills for want of memory: the group is gone before it looks.
        """
        filters = {"container": container_name(self.run_id, name), "event": "kill"}
        began, ended = (datetime.fromisoformat(status[key]).timestamp() for key in ("StartedAt", "FinishedAt"))
        # The engine notes a kill just after it has sent the signal, and answers when that time is over.
        window = int(began), math.ceil(ended + KILL_NOTED)
        with contextlib.closing(self._client.events(*window, decode=True, filters=filters)) as events:
            return any(event["timeNano"] / 1e9 >= began for event in events)

    def _check_alive(self, name: str) -> None:
        status = self._ended(name)
        if status is None:
            return
        if why := self._starvation(name, status):
            raise HostError(why)
        self._give_up(name, f"ended with status {status['ExitCode']}")

    def _give_up(self, name: str, why: str) -> NoReturn:
        log = b"".join(self.logs(name)).decode(errors="replace").strip().splitlines()
        raise HostError(f"{name} {why}; the last it said: {log[-1] if log else 'nothing'}")


def _out_of_memory(name: str, limit: float) -> str:
    return (
        f"{name} ran out of memory: its container is held to {format_size(limit)}, of which the agent with torch takes "
        "about 200MB beside the weights and activations of the plan: give it more, or let it hold less by more "
        "devices, a smaller model, batch_size or in_flight"
    )


@dataclass(frozen=True)
class RunningContainer:
    """One container of some run, as the engine lists it."""

    run: str
    name: str
    state: str
    since: str
    """In the engine's words, e.g. 'Up 3 minutes'."""
    address: str
    control_url: str


def running_labs(client: docker.DockerClient) -> dict[str, list[RunningContainer]]:
    """Return every run that the engine holds something of, with its containers; anybody's, not only this user's."""
    found: dict[str, list[RunningContainer]] = {run: [] for run in sorted(labelled_runs(client))}
    for each in client.api.containers(all=True, filters={"label": RUN}):
        run, labels = str(each["Labels"][RUN]), each["Labels"]
        networks = each["NetworkSettings"]["Networks"]
        data = networks.get(_network_name(run, "data"), {})
        ports = [port["PublicPort"] for port in each["Ports"] if port.get("PublicPort")]
        found.setdefault(run, []).append(
            RunningContainer(
                run=run,
                name=labels.get(DEVICE) or labels.get(ROLE, "?"),
                state=each["State"],
                since=each["Status"],
                # A container that is down keeps its place in the network's settings, not in its own.
                address=data.get("IPAddress") or (data.get("IPAMConfig") or {}).get("IPv4Address", ""),
                control_url=f"http://127.0.0.1:{ports[0]}" if ports else "",
            )
        )
    for containers in found.values():
        containers.sort(key=lambda container: container.name)
    return found


def container_logs(client: docker.DockerClient, run: str, name: str, *, follow: bool = False) -> Iterator[bytes]:
    """Yield what a device's container (or `shaper`) has written, piece by piece; with ``follow`` until it ends.

    Raises:
        TestbedError: there is no such container, or no longer.

    """
    try:
        yield from client.api.logs(container_name(run, name), stream=True, follow=follow)
    except NotFound:
        raise TestbedError(f"there is no container of {name} in {run}, and so no log: see 'testbed ps'") from None


def container_name(run: str, name: str) -> str:
    """Return what the container of a device, or of the shaper, is called."""
    return f"testbed-{run}-{name}"


def _check_devices(experiment: Experiment) -> None:
    for device in experiment.devices:
        if device.memory < MINIMAL_MEMORY:
            raise InputError(
                f"{device.name} has {format_size(device.memory)} of memory, in which no agent starts: give it "
                f"{format_size(MINIMAL_MEMORY)} at least, or run it with '--runtime simulate'",
                ("devices",),
            )
    clash = _NAMES_KEPT_FOR_US & {device.name for device in experiment.devices}
    if clash:
        raise InputError(
            f"no device can be called '{clash.pop()}': the testbed has one of its own; rename it", ("devices",)
        )


def _network_name(run: str, kind: str) -> str:
    return f"testbed-{run}-{kind}"


def _make_networks(client: docker.DockerClient, run: str, within: str, devices: int) -> IPv4Network:
    """Make the control and the data network; return the subnet of the latter."""
    subnet = _make_network(client, run, "data", within, devices, internal=True)
    # Nobody but the controller is to be reached over the unshaped network, and nothing beyond it.
    closed = {
        "com.docker.network.bridge.enable_icc": "false",
        "com.docker.network.bridge.enable_ip_masquerade": "false",
    }
    try:
        _make_network(client, run, "control", DEFAULT_RANGE, devices + 1, options=closed)
    except HostError:
        # Without br_netfilter the engine cannot keep containers of one bridge apart.
        _make_network(client, run, "control", DEFAULT_RANGE, devices + 1)
    return subnet


def _make_network(
    client: docker.DockerClient, run: str, kind: str, within: str, devices: int, **settings: Any
) -> IPv4Network:
    taken = [*host_routes(), *subnets(client)]
    complaint = f"every subnet of {within} that would do is taken"
    for subnet in free_subnets(within, devices, taken):
        pool = IPAMConfig(pool_configs=[IPAMPool(subnet=str(subnet))])
        try:
            client.api.create_network(
                _network_name(run, kind), "bridge", ipam=pool, labels={RUN: run}, check_duplicate=True, **settings
            )
        except APIError as error:
            complaint = str(error.explanation)
            if "overlaps" not in complaint and "conflict" not in complaint:
                break
            continue  # another run took it between our look and our request
        return subnet
    raise HostError(
        f"the {kind} network cannot be made ({complaint}): remove old runs with 'testbed down --all' or give the "
        "scenario another network.subnet"
    )


def subnets(client: docker.DockerClient) -> list[IPv4Network]:
    """Return the subnets that networks of the engine have."""
    configurations = (each for network in client.api.networks() for each in network["IPAM"]["Config"] or ())
    return [IPv4Network(each["Subnet"]) for each in configurations if ":" not in each.get("Subnet", ":")]


def control_url(found: Mapping[str, Any]) -> str:
    """Return where an inspected container's control port is published; empty when it is not."""
    bindings = (found["NetworkSettings"]["Ports"] or {}).get(f"{CONTROL_PORT}/tcp")
    return f"http://127.0.0.1:{bindings[0]['HostPort']}" if bindings else ""


def healthy(url: str) -> bool:
    """Return whether an agent or shaper answers there."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _results(futures: list[Future[DeviceContainer]]) -> list[DeviceContainer]:
    return [future.result() for future in futures]


@contextlib.contextmanager
def _unless(*codes: int) -> Any:
    """Take these refusals of the engine for 'it is so already'."""
    try:
        yield
    except APIError as error:
        if error.status_code not in codes:
            raise HostError(f"the engine refuses: {error.explanation}") from error
