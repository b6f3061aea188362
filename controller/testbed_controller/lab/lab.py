"""The devices and shaper of a run as containers: creation, look-up, faults and removal."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import APIError, NotFound
from urllib3.exceptions import HTTPError

from testbed.common.errors import HostError, InputError, TestbedError
from testbed.common.quantities import format_size
from testbed.experiment import Experiment
from testbed.methods.program.workload import programs_of
from testbed.network.checks import SHAPER
from testbed.network.link import Link, Pair
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario, Trial
from testbed.validation import find_method
from testbed_controller.lab import runstate
from testbed_controller.lab.clients import Agent, Shaper
from testbed_controller.lab.clocks import EngineClock, HostClock
from testbed_controller.lab.containers import (
    ControlUrl,
    DeviceContainer,
    container_logs,
    container_name,
    device_settings,
    device_url,
    inspect,
    make_container,
    published_url,
    shaper_settings,
)
from testbed_controller.lab.engine import connect, ensure_engine, facts, refuse_unusable
from testbed_controller.lab.engineaddress import EngineAddress, chosen_engine
from testbed_controller.lab.health import Health
from testbed_controller.lab.images import ensure_images
from testbed_controller.lab.memory import check_memory, describe_small_memory
from testbed_controller.lab.networks import (
    data_subnet,
    device_addresses,
    make_control_network,
)
from testbed_controller.lab.programimages import device_images
from testbed_controller.lab.reaper import Reaper
from testbed_controller.lab.removal import DEVICE, RUN, remove_run
from testbed_controller.shaping.plan import Endpoint

CREATION_WORKERS = max(4, 2 * (os.cpu_count() or 1))
"""Number of containers created concurrently; the engine would queue further requests."""
MINIMAL_MEMORY = 32 * 2**20
"""Minimum memory of a device in bytes: an idle agent needs about 25 MB. With torch, it needs about 200 MB more."""

LEASE_SECONDS = 1800.0
"""Lifetime of a container without its controller, in seconds; long enough for a busy host."""
RENEWAL_SECONDS = 60.0
"""Interval in which leases are renewed, in seconds."""
RECONNECT_SECONDS = 0.2
"""Pause before reconnecting to the engine's event stream, in seconds."""

Progress = Callable[[str], None]
"""A function that shows the user a line about the progress."""


class RunLab:
    """The common state of a lab on one engine or on several."""

    def __init__(
        self, state: runstate.RunState, trial: Trial, subnet: IPv4Network
    ) -> None:
        self._state = state
        self._reaper: Reaper | None = None
        self.trial = trial
        self.experiment = trial.experiment
        self.subnet = subnet

    @property
    def run_id(self) -> str:
        """The ID of the run, the label of all containers."""
        return self._state.run

    @property
    def token(self) -> str:
        """The secret of this run, from which the tokens of agents and shaper are derived; no container has it."""
        return self._state.token

    def check_compatible(self, trial: Trial) -> None:
        """Raise InputError if a trial needs other devices, links or images than the lab has."""
        present = self.experiment
        requested = trial.experiment
        has_links = present.links == requested.links
        has_network = has_links and present.cells == requested.cells
        requested_images = _program_images(requested)
        # A workload without programs runs on any lab.
        has_images = not requested_images
        has_images = has_images or requested_images == _program_images(present)
        is_equal_by_key = {
            "devices": present.devices == requested.devices,
            "network": has_network,
            "workload.programs": has_images,
        }
        for key, is_equal in is_equal_by_key.items():
            if not is_equal:
                raise InputError(
                    f"{key}: differs from the lab {self.run_id}, in which only the workload can change: "
                    "use the lab's values, or run 'testbed down' and 'testbed up' again"
                )

    def note_results(self, results: Path) -> None:
        """Store the results folder of the active run."""
        self._state = replace(self._state, results=str(results))
        runstate.write(self._state)

    def _take_down(self, remove: Callable[[], object]) -> bool:
        """Remove the run; return False if the reaper has to continue after an interruption or failure."""
        # A reaper removes a run once, so a second call must not use the reaper again: its process has ended.
        reaper = self._reaper
        self._reaper = None
        if reaper is not None:
            return reaper.remove(remove)
        remove()
        return True


def _program_images(
    experiment: Experiment,
) -> dict[str, tuple[str | None, tuple[str, ...]]]:
    """Return the image and the packages of each device's program."""
    names = [device.name for device in experiment.devices]
    programs = programs_of(experiment.workload, names)
    return {name: (part.image, part.packages) for name, part in programs.items()}


class Lab(RunLab):
    """The containers and networks of one run on one engine.

    Example::

        lab = Lab.create(trial)
        lab.kill("worker1")
        lab.down()
    """

    def __init__(
        self,
        client: docker.DockerClient,
        state: runstate.RunState,
        trial: Trial,
        subnet: IPv4Network,
        *,
        device_names: Collection[str] | None = None,
        url: ControlUrl | None = None,
        clock: HostClock | None = None,
    ) -> None:
        """``device_names`` names the devices on this engine; None means all devices of the run.

        ``url`` returns the control URL of a container; ``clock`` is the clock of a remote engine's host.
        """
        super().__init__(state, trial, subnet)
        self._client = client
        self._url = url or self._find_control_url
        self._clock = clock
        names = [device.name for device in trial.experiment.devices]
        # Includes devices on other engines, since these are peers of the devices on this engine.
        self._addresses: dict[str, str] = {}
        for name, address in device_addresses(subnet, names).items():
            self._addresses[name] = str(address)
        self._local_names = [
            name for name in names if device_names is None or name in device_names
        ]
        self.devices: dict[str, DeviceContainer] = {}
        self._shaper_url = ""
        self._agents: dict[str, Agent] = {}
        self.removed = threading.Event()
        """Set when the removal of the lab begins."""
        memory = {device.name: device.memory for device in trial.experiment.devices}
        self.health = Health(client, state.run, memory)
        self.health.shares_kernel = clock is None
        self.ending = self.health.ending
        """Function that returns the cause of a container's end; see `Health.ending`."""

    # Creation and look-up

    @classmethod
    def create(
        cls,
        trial: Trial,
        run_id: str | None = None,
        *,
        links: str = "auto",
        progress: Progress | None = None,
        results: Path | None = None,
        keep: bool = False,
    ) -> Lab:
        """Create network, shaper and devices; return when all are healthy and every link is shaped.

        A failure or interruption leaves nothing behind. The lab is removed if this process dies before `down`, except
        with ``keep``. ``results`` is the run's results folder. Raises HostError if the engine, images, networks or
        containers are unavailable, and InputError if the scenario's subnet is too small.
        """
        say = progress or (lambda _text: None)
        experiment = trial.experiment
        check_devices(experiment)
        engine = chosen_engine()
        client = ensure_engine(say, engine)
        refuse_unusable(client, engine)
        _check_machine(client, trial, say)
        images = ensure_images(client, say)
        devices = device_images(
            client, trial.scenario.workload, experiment, images, say
        )
        state = new_state(trial, run_id, results, keep=keep, engine=engine)
        # The reaper starts, and the state is written, before anything exists on the engine: whenever this process
        # dies, the reaper removes the rest by the label, and 'testbed down' knows the run's ID and engine.
        reaper = Reaper(state.run)
        remove = partial(remove_run, client, state.run, recheck=False)
        with reaper.guarding(remove, keep=keep):
            runstate.write(state)
            network = trial.scenario.network
            subnet = data_subnet(network.subnet, len(experiment.devices))
            lab = cls(client, state, trial, subnet)
            say("creating the network")
            make_control_network(client, state.run, network.control_subnet)
            lab.populate(devices, images.shaper, links, say)
        if not keep:
            lab._reaper = reaper
            threading.Thread(target=lab.renew_leases, name="lease", daemon=True).start()
        return lab

    @classmethod
    def open(cls, run_id: str) -> Lab:
        """Open an existing lab, from any process.

        Raises InputError for an unknown run, and HostError if no engine responds.
        """
        state = runstate.read(run_id)
        client = connect(state.engine)
        trial = trial_of(state)
        subnet = data_subnet(
            trial.scenario.network.subnet, len(trial.experiment.devices)
        )
        lab = cls(client, state, trial, subnet)
        lab.refresh()
        # Without a shaper, the clocks cannot be compared. Then no program can be started or followed, so no clock is
        # needed.
        with contextlib.suppress(HostError):
            lab._compare_clocks()
        return lab

    def _compare_clocks(self) -> None:
        """Convert the devices' times if the engine's machine has another monotonic clock."""
        if self._clock is not None:
            return
        clock = EngineClock(lambda: float(self.shaper.facts()["monotonic"]))
        if clock.has_offset:
            self._clock = clock
            self.health.shares_kernel = False
            follow = partial(clock.follow, self.removed)
            threading.Thread(target=follow, name="clock", daemon=True).start()

    @property
    def broadcast(self) -> str:
        """The broadcast address of the data network."""
        return str(self.subnet.broadcast_address)

    def refresh(self) -> None:
        """Update the state of every container; a missing one is ``gone``."""
        # The shaper comes first, since the URLs of the devices begin with the shaper's.
        self._shaper_url = self.inspect(SHAPER).control_url
        for name in self._local_names:
            self.devices[name] = inspect(
                self._client, self.run_id, name, self._addresses[name], self._url
            )

    def states(self) -> dict[str, str]:
        """Return the engine's state of each device's container, with a single query."""
        filters = {"label": [f"{RUN}={self.run_id}", DEVICE]}
        states: dict[str, str] = {}
        for container in self._client.api.containers(all=True, filters=filters):
            states[str(container["Labels"][DEVICE])] = str(container["State"])
        return {name: states.get(name, "gone") for name in self.devices}

    def facts(self) -> dict[str, Any]:
        """Return the properties of engine, images and link backend for a run's manifest."""
        images = {}
        filters = {"label": f"{RUN}={self.run_id}"}
        for container in self._client.api.containers(all=True, filters=filters):
            images[str(container["Image"])] = str(container["ImageID"])
        lab_facts = {
            "engine": facts(self._client),
            "images": images,
            "shaper": self.shaper.facts(),
        }
        if isinstance(self._clock, EngineClock):
            lab_facts["clock"] = self._clock.estimator.facts()
        return lab_facts

    def container_logs(self) -> dict[str, Iterator[bytes]]:
        """Return the output of each container by device name or ``shaper``; read during iteration."""
        names = [*self._local_names, SHAPER]
        return {name: container_logs(self._client, self.run_id, name) for name in names}

    # Clients

    @cached_property
    def shaper(self) -> Shaper:
        """The client of the run's shaper."""
        return Shaper(self._shaper_url, self._state.token_of(SHAPER))

    def agent(self, name: str) -> Agent:
        """Return a client of a device's agent at the current port; raises `TestbedError` if the device is off."""
        url = self._device(name).control_url
        if not url:
            raise TestbedError(
                f"{name} is {self.devices[name].state}: its agent runs after 'testbed fault restart {name}'"
            )
        agent = self._agents.get(name)
        if agent is None or agent.url != url:
            agent = Agent(url, self._state.token_of(name), name, self._clock)
            self._agents[name] = agent
        return agent

    def changes(self, on_return: Callable[[float], None]) -> ContainerChanges:
        """Return an iterator over state changes of the run's containers, including the shaper."""
        return ContainerChanges(self, on_return)

    # Faults and repairs

    def kill(self, name: str) -> None:
        """Kill the device's container, as a power cut would; no effect on a device that is down."""
        device = self._device(name)
        with _ignore_errors(409, 404):  # 409: not running; 404: removed
            self._client.api.kill(device.id, "SIGKILL")
        with _ignore_errors(404):
            self._client.api.wait(device.id, timeout=30)
        # The shaper keeps the network namespace of the dead device open, and the kernel answers its peers until the
        # shaper releases the namespace. Without a shaper, there are no links over which it could answer.
        with contextlib.suppress(HostError):
            self.shaper.release()
        self.inspect(name)

    def start(self, name: str) -> None:
        """Start the device again, still without links (see `admit`). Raises `TestbedError` if the start fails."""
        device = self._device(name)
        try:
            self._client.api.start(device.id)
        except NotFound:
            raise TestbedError(
                f"the container of {name} was removed and cannot be started again"
            ) from None
        except APIError as error:
            raise HostError(f"cannot start {name}: {error.explanation}") from error
        self.inspect(name)

    def admit(self, name: str, links: Mapping[Pair, Link] | None = None) -> None:
        """Shape the links of a started device and wait until the agent is healthy.

        The links have their current properties, including active faults; ``links`` replaces the properties of some
        links before.
        """
        device = self.inspect(self._device(name).name)
        # Links are shaped before the agent is healthy, because the device must not send or receive over an interface
        # without impairments. A restarted container has a new network namespace, in which nothing is shaped.
        self._shape_links([device], links or {})
        self.health.wait_for({name: device.control_url})
        self._write_metrics_targets()

    def _write_metrics_targets(self) -> None:
        """Store the metrics URLs of the devices, whose ports change with every start."""
        urls = {}
        for name, device in self.devices.items():
            if device.control_url:
                urls[name] = device.control_url
        runstate.write_targets(self._state, urls)

    def _shape_links(
        self, devices: Iterable[DeviceContainer], links: Mapping[Pair, Link]
    ) -> None:
        specs = {spec.name: spec for spec in self.experiment.devices}
        # On several hosts the engine's overlay network provides the interface, otherwise the shaper.
        subnet = None if self._state.hosts else str(self.subnet)
        endpoints = []
        for device in devices:
            spec = specs[device.name]
            access = (spec.uplink, spec.downlink)
            endpoint = Endpoint(
                device.name, device.pid, device.address, *access, subnet
            )
            endpoints.append(endpoint)
        # Devices on other hosts are attached without a process (0), because the shaper's plan needs their addresses and
        # access limits.
        elsewhere = self._addresses.keys() - set(self._local_names)
        for name in sorted(elsewhere):
            spec = specs[name]
            access = (spec.uplink, spec.downlink)
            endpoints.append(Endpoint(name, 0, self._addresses[name], *access))
        self.shaper.attach(
            endpoints, links, self.experiment.seed, self.experiment.cells
        )

    def pause(self, name: str) -> None:
        """Freeze all processes of the device; its kernel still receives packets."""
        device = self._device(name)
        with _ignore_errors(409):  # paused already
            self._client.api.pause(device.id)
        self.inspect(name)

    def resume(self, name: str) -> None:
        """Continue a paused device."""
        device = self._device(name)
        with _ignore_errors(409, 500):  # 500: 'is not paused' in older engines
            self._client.api.unpause(device.id)
        self.inspect(name)

    def down(self) -> bool:
        """Remove all parts of the run.

        Returns False after an interruption or without a response of the engine; the removal then continues in the
        background.
        """
        self.removed.set()
        return self._take_down(
            partial(remove_run, self._client, self.run_id, recheck=False)
        )

    def renew_leases(self) -> None:
        """Renew the lease of every running container until the lab is removed."""
        while not self.removed.wait(RENEWAL_SECONDS):
            renewals = [self.shaper.renew]
            for name, container in list(self.devices.items()):
                if container.control_url:
                    renewals.append(self.agent(name).renew)
            for renew in renewals:
                # A container may be down or busy; further renewals follow.
                with contextlib.suppress(TestbedError):
                    renew()

    # Internals

    def _device(self, name: str) -> DeviceContainer:
        try:
            return self.devices[name]
        except KeyError:
            raise InputError(
                f"unknown device '{name}'; {self.run_id} has {', '.join(self.devices)}"
            ) from None

    def inspect(self, name: str) -> DeviceContainer:
        """Update and return the state of a device's container or the shaper's."""
        address = self._addresses.get(name, "")
        container = inspect(self._client, self.run_id, name, address, self._url)
        if name in self.devices:
            self.devices[name] = container
        return container

    def _find_control_url(self, name: str, inspection: Mapping[str, Any]) -> str:
        if name == SHAPER:
            return published_url(inspection)
        return device_url(self._shaper_url, name) if inspection["State"]["Pid"] else ""

    def populate(
        self, images: Mapping[str, str], shaper_image: str, links: str, say: Progress
    ) -> None:
        """Create and start all containers, shape the links, and wait until all devices are healthy."""
        settings = {SHAPER: shaper_settings(self._state, shaper_image, links)}
        for spec in self.experiment.devices:
            if spec.name in self._local_names:
                settings[spec.name] = device_settings(
                    self._state, images[spec.name], spec, self._addresses
                )
        say(f"starting {len(settings) - 1} devices and the shaper")
        pool = ThreadPoolExecutor(CREATION_WORKERS, "lab")
        try:
            creations = []
            for name, container_settings in settings.items():
                create = partial(make_container, self._client, self.run_id)
                creations.append(pool.submit(create, name, container_settings))
            # The first creation is that of the shaper, which starts while the engine creates the devices.
            creations[0].result()
            self._shaper_url = self.inspect(SHAPER).control_url
            self.health.wait_for(
                {SHAPER: self._shaper_url}, published=not self._state.hosts
            )
            self._compare_clocks()
            for creation in creations:
                creation.result()
            for device in pool.map(self.inspect, self._local_names):
                self.devices[device.name] = device
        finally:
            # Wait for active requests, so that no container appears after the cleanup.
            pool.shutdown(wait=True, cancel_futures=True)
        say("shaping the links")
        try:
            self._shape_links(self.devices.values(), self.experiment.links)
        except HostError:
            # If a device has ended, the cause of its end explains the error better.
            for name in self.devices:
                self.health.check_alive(name)
            raise
        say("waiting for the devices")
        urls = {name: device.control_url for name, device in self.devices.items()}
        self.health.wait_for(urls)
        self._write_metrics_targets()


def _check_machine(client: docker.DockerClient, trial: Trial, say: Progress) -> None:
    """Raise HostError if the engine's machine has too little memory; report limits that the machine ignores."""
    devices = trial.experiment.devices
    needs_torch = find_method(trial.scenario).needs_torch
    machine = facts(client)
    problem = describe_small_memory(devices, torch=needs_torch)
    if problem:
        raise HostError(problem)
    check_memory(devices, machine["memory"], torch=needs_torch)
    if machine["unlimited"]:
        names = ", ".join(machine["unlimited"])
        say(f"limits on {names} are not enforced: see 'testbed doctor'")


def new_state(
    trial: Trial,
    run_id: str | None,
    results: Path | None,
    *,
    keep: bool,
    engine: EngineAddress | None = None,
    hosts: Mapping[str, list[str]] | None = None,
) -> runstate.RunState:
    """Return the state of a new run, with a unique ID by default."""
    return runstate.RunState(
        run=run_id or runstate.new_id(trial.scenario.name),
        token=secrets.token_urlsafe(24),
        scenario=trial.scenario.model_dump(
            mode="json", by_alias=True, exclude_none=True
        ),
        point=trial.point,
        repetition=trial.repetition,
        results=None if results is None else str(results),
        lease=None if keep else LEASE_SECONDS,
        engine=engine,
        hosts=dict(hosts or {}),
    )


def trial_of(state: runstate.RunState) -> Trial:
    """Return the trial of a lab."""
    trial = trials(Scenario.model_validate(state.scenario))[0]
    return replace(trial, point=state.point, repetition=state.repetition)


def check_devices(experiment: Experiment) -> None:
    """Raise InputError for a device without enough memory for an agent, and for shared machines."""
    if experiment.machines:
        raise InputError(
            "machines: containers cannot share the processors of a machine: "
            "remove this key, or use '--runtime simulate'"
        )
    for device in experiment.devices:
        if device.memory < MINIMAL_MEMORY:
            raise InputError(
                f"devices: {device.name} has {format_size(device.memory)} of memory, too little for an agent: "
                f"use at least {format_size(MINIMAL_MEMORY)}, or '--runtime simulate'"
            )


@contextlib.contextmanager
def _ignore_errors(*codes: int) -> Iterator[None]:
    """Ignore errors of the engine with these codes; they mean that the container is in the requested state already."""
    try:
        yield
    except APIError as error:
        # Podman reports this case by a text instead of a specific code.
        is_podman_refusal = "container state improper" in str(error.explanation)
        if error.status_code not in codes and not is_podman_refusal:
            raise HostError(f"the engine refused: {error.explanation}") from error


class ContainerChanges:
    """An iterator over all state changes of a run's containers, by this controller, the user or the engine.

    An event of the engine only triggers a query of the container's current state. When the engine responds after a
    silence, all containers are queried again, so no change is lost.
    """

    def __init__(self, lab: Lab, on_return: Callable[[float], None]) -> None:
        """When the engine responds again, ``on_return`` is called with the duration of the absence in seconds."""
        self._lab = lab
        self._on_return = on_return
        self._yielded: dict[str, tuple[str, int]] = {}
        """State and process ID of each container as yielded last."""
        self._closed = threading.Event()
        self._stream: Any = None
        """The engine's present stream of events."""

    def __iter__(self) -> Iterator[DeviceContainer]:
        """Yield each container initially, and after every change of state or process.

        Ends after `close`. Raises HostError if the engine stops responding.
        """
        lab = self._lab
        names = {}
        for name in (*lab.devices, SHAPER):
            names[container_name(lab.run_id, name)] = name
        filters = {
            "type": "container",
            # The last two are Podman's names.
            "event": ["start", "die", "pause", "unpause", "destroy", "died", "remove"],
            "label": f"{RUN}={lab.run_id}",
        }
        absent_since = None
        while not self._closed.is_set():
            with contextlib.suppress(requests.RequestException, HTTPError, OSError):
                self._stream = lab._client.events(decode=True, filters=filters)
                if absent_since is not None:
                    self._on_return(time.monotonic() - absent_since)
                    absent_since = None
                for name in names.values():
                    yield from self._query(name)
                for event in self._stream:
                    container = event["Actor"]["Attributes"]["name"]
                    if container in names:
                        yield from self._query(names[container])
            # The stream has ended, or the engine refuses another one. The absence begins at the first failure.
            if absent_since is None:
                absent_since = time.monotonic()
            self._closed.wait(RECONNECT_SECONDS)

    def close(self) -> None:
        """End the iteration."""
        self._closed.set()
        if self._stream is not None:
            with contextlib.suppress(OSError, AttributeError):  # already closed
                self._stream.close()

    def _query(self, name: str) -> Iterator[DeviceContainer]:
        container = self._lab.inspect(name)
        # The process ID is compared too, since a container may restart between two queries that find equal states.
        current = (container.state, container.pid)
        if self._yielded.get(name) != current and not self._closed.is_set():
            self._yielded[name] = current
            yield container
