"""A lab over several engines: a `Lab` on each with its devices, its parts, combined into one.

A host that the controller cannot reach for some seconds is lost. Its devices count as down until it responds again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import ChainMap
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property, partial
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, TypeVar

import docker
import requests
from docker.errors import DockerException, NotFound

from testbed.common.errors import HostError, InputError
from testbed.experiment import Experiment
from testbed.network.checks import SHAPER
from testbed.network.link import Link, Pair
from testbed.scenario.schema import Trial
from testbed_controller.hosts.channel import LOST_SECONDS, Channel
from testbed_controller.hosts.contexts import Host, find_manager, reach, reach_all
from testbed_controller.hosts.placement import Capacity, LabPart, place
from testbed_controller.hosts.provision import (
    KEEPER,
    MTU,
    copy_images,
    make_keeper,
    make_overlay,
)
from testbed_controller.hosts.removal import remove_everywhere
from testbed_controller.hosts.shaper import PathBlocked, Shapers
from testbed_controller.lab import runstate
from testbed_controller.lab.clients import Agent
from testbed_controller.lab.containers import DeviceContainer, container_name
from testbed_controller.lab.engine import connect_to_run, ensure_engine
from testbed_controller.lab.engineaddress import chosen_engine
from testbed_controller.lab.health import Ending
from testbed_controller.lab.images import ensure_images
from testbed_controller.lab.lab import (
    Lab,
    Progress,
    RunLab,
    check_devices,
    new_state,
    trial_of,
)
from testbed_controller.lab.networks import network_name, subnet_of
from testbed_controller.lab.programimages import device_images
from testbed_controller.lab.reaper import Reaper

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

GOSSIP_SECONDS = 6.0
"""Maximum time in which the hosts of a swarm learn about new containers, in seconds."""


class HostsLab(RunLab):
    """The containers and the network of one run on several hosts, with the interface of a `Lab`."""

    def __init__(
        self,
        state: runstate.RunState,
        trial: Trial,
        hosts: Mapping[str, Host],
        subnet: IPv4Network,
    ) -> None:
        """``hosts`` are all hosts of ``state``; a keeper must be running on each."""
        super().__init__(state, trial, subnet)
        self._hosts = hosts
        self.lost: set[str] = set()
        """Hosts that no longer respond; `_Changes` updates the set."""
        self._channels: dict[str, Channel] = {}
        self.parts: dict[str, Lab] = {}
        """The part of the lab on each host."""
        keeper = container_name(state.run, KEEPER)
        try:
            for name, host in hosts.items():
                # The channel provides connections to the containers of the host, and converts times of its clock.
                channel = Channel(host, keeper)
                self._channels[name] = channel
                self.parts[name] = Lab(
                    host.client,
                    state,
                    trial,
                    subnet,
                    device_names=state.hosts[name],
                    url=channel.url,
                    clock=channel,
                )
        except BaseException:
            self._close_channels()
            raise

    @classmethod
    def create(
        cls,
        trial: Trial,
        hosts: Sequence[str],
        fixed_hosts: Mapping[str, str],
        *,
        links: str = "auto",
        progress: Progress | None = None,
        results: Path | None = None,
        keep: bool = False,
        placement: str = "by-load",
    ) -> HostsLab:
        """Create a lab on the engines of these docker contexts; ``fixed_hosts`` assigns devices to hosts.

        Further arguments and errors are those of `Lab.create`; also raises HostError if hosts do not respond or are not
        in one swarm.
        """
        say = progress or (lambda _text: None)
        check_devices(trial.experiment)
        host_by_name = reach_all(hosts)
        manager = find_manager(host_by_name)
        host_by_device = place_devices(
            capacities(host_by_name), trial.experiment, fixed_hosts, placement
        )
        shaper_image, device_image = _provide_images(host_by_name, trial, say)
        # Hosts without a device also have an entry, because each host has a keeper and a shaper.
        devices_by_host: dict[str, list[str]] = {name: [] for name in host_by_name}
        for device, host in host_by_device.items():
            devices_by_host[host].append(device)
        state = new_state(trial, None, results, keep=keep, hosts=devices_by_host)
        reaper = Reaper(state.run, "testbed_controller.hosts.removal")
        remove = partial(remove_everywhere, state.run, host_by_name.values())
        with reaper.guarding(remove, keep=keep), ExitStack() as cleanup_after_error:
            # The state is written before anything is created, so that `testbed down` finds the run if this process is
            # killed.
            runstate.write(state)
            say("creating the network")
            allowed_range = trial.scenario.network.subnet
            subnet = make_overlay(
                manager,
                host_by_name.values(),
                state.run,
                allowed_range,
                len(host_by_device),
            )
            # Keepers start before devices, since the controller reaches the containers of a host through its keeper.
            with ThreadPoolExecutor(len(host_by_name)) as pool:
                start = partial(make_keeper, state=state, image=shaper_image)
                list(pool.map(start, host_by_name.values()))
            lab = cls(state, trial, host_by_name, subnet)
            cleanup_after_error.callback(lab._close_channels)
            say(f"starting {len(host_by_device)} devices, and a shaper on each host")
            populate = partial(
                Lab.populate,
                images=device_image,
                shaper_image=shaper_image,
                links=links,
                say=lambda _text: None,
            )
            lab._call_on_all(populate)
            say("measuring the paths between the hosts")
            lab._subtract_path_delays()
            # The lab needs its channels, which only an error before this line closes.
            cleanup_after_error.pop_all()
        if not keep:
            lab._reaper = reaper
            for name, part in lab.parts.items():
                threading.Thread(
                    target=part.renew_leases, name=f"lease-{name}", daemon=True
                ).start()
        return lab

    @classmethod
    def open(cls, run_id: str) -> HostsLab:
        """Open an existing lab, from any process; raises the errors of `Lab.open`."""
        state = runstate.read(run_id)
        host_by_name = reach_all([*state.hosts])
        subnet = _overlay_subnet(find_manager(host_by_name).client, run_id)
        lab = cls(state, trial_of(state), host_by_name, subnet)
        lab.refresh()
        return lab

    # Interface of a lab

    @property
    def broadcast(self) -> str | None:
        """The broadcast address of the data network; None for devices on several hosts."""
        # The overlay network (a VXLAN) does not carry broadcasts between hosts.
        used_hosts = [host for host, names in self._state.hosts.items() if names]
        if len(used_hosts) > 1:
            return None
        return str(self.subnet.broadcast_address)

    @property
    def devices(self) -> MutableMapping[str, DeviceContainer]:
        """The devices of all hosts, in the order of the scenario."""
        containers = ChainMap(*(part.devices for part in self.parts.values()))
        devices = {}
        for device in self.experiment.devices:
            if device.name in containers:
                devices[device.name] = containers[device.name]
        return devices

    @cached_property
    def shaper(self) -> Shapers:
        """The combined shapers of all hosts."""
        shapers = {name: part.shaper for name, part in self.parts.items()}
        return Shapers(
            shapers, self._state, self._channels, self.experiment.links, self.lost
        )

    def refresh(self) -> None:
        """Update the state of every container."""
        self._call_on_all(lambda part: part.refresh())

    def states(self) -> dict[str, str]:
        """Return the engine's state of each device's container; ``lost`` on a lost host."""
        states = {name: device.state for name, device in self.devices.items()}
        self._call_on_all(lambda part: states.update(part.states()))
        return states

    def facts(self) -> dict[str, Any]:
        """Return the first host's properties for a run's manifest, with the properties of each host under ``hosts``."""
        part_facts = self._call_on_all(lambda part: part.facts())
        host_facts = dict(zip(self.parts, part_facts, strict=True))
        for name, channel in self._channels.items():
            host_facts[name] |= {
                "devices": self._state.hosts[name],
                "node": self._hosts[name].node,
                "clock": channel.estimator.facts(),
            }
        # Readers of manifests expect the keys of a lab on one engine, so the facts of the first host are there.
        first = next(iter(host_facts.values()))
        return {**first, "hosts": host_facts}

    def container_logs(self) -> dict[str, Iterator[bytes]]:
        """Return the output of each container; the shaper of a host is ``shaper.HOST``."""
        logs: dict[str, Iterator[bytes]] = {}
        for host, part in self.parts.items():
            if host not in self.lost:
                host_logs = part.container_logs()
                logs[f"{SHAPER}.{host}"] = host_logs.pop(SHAPER)
                logs |= host_logs
        return logs

    def agent(self, name: str) -> Agent:
        """Return the client of a device's agent."""
        return self._part_with(name).agent(name)

    def changes(self, on_return: Callable[[float], None]) -> _Changes:
        """Return an iterator over the container changes on all hosts.

        ``on_return`` is called with the length of a silence in seconds when a host responds again.
        """
        return _Changes(self, on_return)

    def kill(self, name: str) -> None:
        """Kill the device's container."""
        self._part_with(name).kill(name)

    def start(self, name: str) -> None:
        """Start the device again."""
        self._part_with(name).start(name)

    def admit(self, name: str, links: Mapping[Pair, Link] | None = None) -> None:
        """Shape the links of a started device and wait until the agent is healthy."""
        if links is not None:
            links = self.shaper.emulated_links(links)
        self._part_with(name).admit(name, links)

    def pause(self, name: str) -> None:
        """Freeze all processes of the device."""
        self._part_with(name).pause(name)

    def resume(self, name: str) -> None:
        """Continue a paused device."""
        self._part_with(name).resume(name)

    def ending(self, name: str, wait_seconds: float = 0.0) -> Ending | None:
        """Return the cause of a container's end; None for a running container.

        If ``name`` is `SHAPER`, return the cause for the first host whose shaper has ended.
        """
        if name == SHAPER:
            return self._shaper_ending()
        host = self._host_of(name)
        if host in self.lost:
            return Ending(self.describe_silence(host))
        return self.parts[host].ending(name, wait_seconds)

    def _shaper_ending(self) -> Ending | None:
        for host, part in self.parts.items():
            if host in self.lost:
                continue
            ending = part.ending(SHAPER)
            if ending is not None:
                return replace(ending, text=f"of {host} {ending.text}")
        return None

    def down(self) -> bool:
        """Remove the run from all hosts; see `Lab.down`. Lost hosts are cleaned up in the background."""
        for part in self.parts.values():
            part.removed.set()
        # A lost host that responds again by now is cleaned up with the others.
        lost = set()
        for name in self.lost:
            if self._channels[name].silent_seconds > LOST_SECONDS:
                lost.add(name)
        self._close_channels()
        hosts = self._hosts.values()
        return self._take_down(
            partial(remove_everywhere, self.run_id, hosts, lost=lost)
        )

    # Internals

    def _subtract_path_delays(self) -> None:
        """Reduce the emulated delay of links between hosts by the delay of the real paths."""
        deadline = time.monotonic() + GOSSIP_SECONDS
        while True:
            try:
                path_delays = self.shaper.measure_path_delays()
                break
            except PathBlocked as error:
                # The overlay network carries packets only after the hosts have learned about the containers. The next
                # measurement follows at once, since each takes some time.
                if time.monotonic() <= deadline:
                    continue
                if error.passes_small:
                    raise HostError(_explain_small_mtu(*error.ends)) from None
                raise HostError(self._explain_blocked_path(*error.ends)) from None
        self._state = replace(self._state, ways=path_delays)
        runstate.write(self._state)
        # The cached shaper was created from the former state, which has no delays of paths. The next access creates
        # another one.
        del self.shaper
        crossing = {}
        for pair, link in self.experiment.links.items():
            if self.shaper.connects_hosts(pair):
                crossing[pair] = link
        self.shaper.set(crossing)

    def _explain_blocked_path(self, source: str, destination: str) -> str:
        """Return an error message naming the ports to open between two hosts."""
        api = find_manager(self._hosts).client.api
        name = network_name(self.run_id, "data")
        network = api.inspect_network(name, verbose=True)
        peers = {str(peer["IP"]) for peer in network.get("Peers") or ()}
        hosts = [self._hosts[source], self._hosts[destination]]
        # Hosts announce containers over port 7946, and packets of containers use port 4789 (VXLAN).
        ports = "TCP and UDP 7946, and UDP 4789"
        # Peers of the network have found each other over port 7946, so this port is open.
        if all(host.address in peers for host in hosts):
            ports = "UDP 4789"
        names = " and ".join(f"{host.name} ({host.address})" for host in hosts)
        return (
            f"the overlay network carries no packets from {source} to {destination}: open {ports} between {names}; if "
            f"the ports are open, 'docker swarm leave' and 'join' {destination} again"
        )

    def _close_channels(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _part_with(self, device: str) -> Lab:
        host = self._host_of(device)
        if host in self.lost:
            raise HostError(f"{device} {self.describe_silence(host)}")
        return self.parts[host]

    def _host_of(self, device: str) -> str:
        for host, devices in self._state.hosts.items():
            if device in devices:
                return host
        known = ", ".join(spec.name for spec in self.experiment.devices)
        raise InputError(f"unknown device '{device}'; {self.run_id} has {known}")

    def describe_silence(self, host: str) -> str:
        """Return the end of a message about a container on a lost host."""
        silent = self._channels[host].silent_seconds
        return f"is on the host {host}, which has been silent for {silent:.1f} s: the host is lost or disconnected"

    def _call_on_all(self, act: Callable[[Lab], T]) -> list[T]:
        """Call a function for the part on each host, except lost hosts, concurrently; return the results in host order.

        A HostError of the function is raised again with the name of the host.
        """

        def attempt(host: str) -> T:
            try:
                return act(self.parts[host])
            except HostError as error:
                raise HostError(f"on {host}: {error}") from error

        responding = [name for name in self.parts if name not in self.lost]
        with ThreadPoolExecutor(len(self.parts)) as pool:
            return list(pool.map(attempt, responding))


def _provide_images(
    host_by_name: Mapping[str, Host], trial: Trial, say: Progress
) -> tuple[str, dict[str, str]]:
    """Build missing images and copy them to all hosts; return the tags of the shaper's and of each device's image."""
    builder = _choose_build_engine(host_by_name, say)
    images = ensure_images(builder, say)
    workload = trial.scenario.workload
    device_image = device_images(builder, workload, trial.experiment, images, say)
    tags = [images.shaper, *device_image.values()]
    copy_images(builder, host_by_name.values(), tags, say)
    return images.shaper, device_image


def _choose_build_engine(
    host_by_name: Mapping[str, Host], say: Progress
) -> docker.DockerClient:
    """Return the engine for building the images: the local engine, or the first host's."""
    # A remote engine may be reachable only by ssh, which plain clients do not support.
    engine = chosen_engine()
    if engine.is_local:
        return ensure_engine(say, engine)
    first = next(iter(host_by_name.values()))
    return first.client


def _overlay_subnet(client: docker.DockerClient, run_id: str) -> IPv4Network:
    """Return the subnet of a run's data network; raises InputError if the network was removed."""
    try:
        return subnet_of(client, run_id, "data")
    except NotFound:
        text = f"the network of run '{run_id}' was removed: clean up with 'testbed down {run_id}'"
        raise InputError(text) from None


def _explain_small_mtu(source: str, destination: str) -> str:
    return (
        f"small packets pass from {source} to {destination}, but full frames of the overlay network ({MTU} bytes in "
        "UDP) do not, since the path carries less than 1500 bytes: set the MTU of both hosts' interfaces to the MTU of "
        "the path ('ip link set dev INTERFACE mtu ...'), or raise the MTU of the path to 1500"
    )


def capacities(hosts: Mapping[str, Host]) -> dict[str, Capacity]:
    """Return the capacity of each host for devices."""
    return {name: Capacity(host.cores, host.memory) for name, host in hosts.items()}


def place_devices(
    hosts: Mapping[str, Capacity],
    experiment: Experiment,
    fixed_hosts: Mapping[str, str],
    placement: str,
) -> dict[str, str]:
    """Return the host of each device.

    The devices of a radio cell share a host, because the gate, which decides which of them transmits, is a process of
    one host.
    """
    cells = [cell.devices for cell in experiment.cells]
    return place(
        experiment.devices, experiment.links, hosts, fixed_hosts, cells, placement
    )


def add_host_faults(original: Sequence[Trial], where: LabPart) -> list[Trial]:
    """Return trials extended by the host faults of a lab; raises the errors of `LabPart.add_faults` and `place`."""
    host_capacities = capacities(reach_all(where.hosts))
    trials = []
    for trial in original:
        host_by_device = place_devices(
            host_capacities, trial.experiment, where.place, where.placement
        )
        trials.append(where.add_faults(trial, host_by_device))
    return trials


class _Changes:
    """An iterator over container changes on several hosts, and over the loss of hosts.

    A host that is silent for `LOST_SECONDS` is lost, and its devices are reported in the state ``lost``. When the host
    responds again, ``on_return`` is called with the length of the silence in seconds, and its devices are reported in
    their current states.
    """

    def __init__(self, lab: HostsLab, on_return: Callable[[float], None]) -> None:
        self._lab = lab
        self._on_return = on_return
        self._changes_by_host = {}
        for name, part in lab.parts.items():
            self._changes_by_host[name] = part.changes(on_return)
        self._queue: queue.SimpleQueue[DeviceContainer | Exception | None] = (
            queue.SimpleQueue()
        )
        self._over = threading.Event()

    def __iter__(self) -> Iterator[DeviceContainer]:
        """Yield each changed container; raises HostError if an engine stops responding."""
        for host, changes in self._changes_by_host.items():
            threading.Thread(
                target=self._follow, args=(host, changes), name="changes", daemon=True
            ).start()
        threading.Thread(target=self._watch_hosts, name="hosts", daemon=True).start()
        while True:
            change = self._queue.get()
            if change is None:
                return
            if isinstance(change, Exception):
                raise change
            yield change

    def _follow(self, host: str, changes: Iterable[DeviceContainer]) -> None:
        """Pass the changes on one host to the iterator, except while the host is lost."""
        try:
            for container in changes:
                if host not in self._lab.lost:
                    self._queue.put(container)
        except Exception as error:  # noqa: BLE001 - raised by the iteration
            # The engine of a lost host cannot respond, and the loss has been reported already.
            if host not in self._lab.lost:
                self._queue.put(error)

    def _watch_hosts(self) -> None:
        """Report the loss and the return of hosts until the iteration ends."""
        last_silence: dict[str, float] = {}
        while not self._over.wait(0.5):
            for host, channel in self._lab._channels.items():
                silent = channel.silent_seconds
                if silent > LOST_SECONDS:
                    last_silence[host] = silent
                    if host not in self._lab.lost:
                        self._lose(host, silent)
                elif host in self._lab.lost:
                    self._readmit(host, last_silence[host])

    def _lose(self, host: str, silent: float) -> None:
        # Added before the update: from then on, `_follow` ignores the engine's changes of this host's containers, which
        # would contradict the loss.
        self._lab.lost.add(host)
        _LOG.info("the host %s is lost: silent for %.1f s", host, silent)
        self._update(host, partial(replace, state="lost", control_url=""))

    def _update(
        self, host: str, change: Callable[[DeviceContainer], DeviceContainer]
    ) -> None:
        """Change and report all devices of a host."""
        part = self._lab.parts[host]
        for name, container in part.devices.items():
            part.devices[name] = change(container)
            self._queue.put(part.devices[name])

    def _readmit(self, host: str, silent: float) -> None:
        """Report the devices of a host again, unless the host's keeper has removed the run.

        An ended shaper shows that the run was removed; then the host stays lost.
        """
        part = self._lab.parts[host]
        with suppress(HostError, DockerException, requests.RequestException):
            if part.ending(SHAPER) is None:
                part.refresh()
                self._lab.lost.discard(host)
                _LOG.info("the host %s responds again after %.1f s", host, silent)
                self._on_return(silent)
                self._update(host, lambda container: container)

    def close(self) -> None:
        """End the iteration."""
        self._over.set()
        for changes in self._changes_by_host.values():
            changes.close()
        self._queue.put(None)


AnyLab = Lab | HostsLab
"""A lab on one engine or on several."""


def create_lab(trial: Trial, where: LabPart, **options: Any) -> AnyLab:
    """Create a lab on the local engine or on several hosts, with the options and errors of `Lab.create`."""
    if where.hosts:
        return HostsLab.create(
            trial, where.hosts, where.place, placement=where.placement, **options
        )
    return Lab.create(trial, **options)


def open_lab(run_id: str) -> AnyLab:
    """Open an existing lab on one engine or several; raises the errors of `Lab.open`."""
    if runstate.hosts_of(run_id):
        return HostsLab.open(run_id)
    return Lab.open(run_id)


def engine_of(run_id: str, device: str) -> docker.DockerClient:
    """Return a connection to the engine of a run's device; raises HostError if the engine does not respond.

    A run without a state file, such as that of another user, is expected on the chosen engine of this user.
    """
    hosts = runstate.hosts_of(run_id)
    if not hosts:
        return connect_to_run(run_id)
    # For a container that is not a device, such as the shaper, the first host is chosen.
    device_host = next(iter(hosts))
    for host, devices in hosts.items():
        if device in devices:
            device_host = host
    return reach(device_host).client
