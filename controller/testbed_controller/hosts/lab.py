"""A lab over several engines: of each a `Lab` with the devices that are there, and what makes one of them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
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
from testbed_controller.hosts.contexts import Host, manager, reach, reach_all
from testbed_controller.hosts.placement import Capacity, LabPart, place
from testbed_controller.hosts.provision import KEEPER, MTU, bring, make_keeper, make_overlay
from testbed_controller.hosts.removal import remove_everywhere
from testbed_controller.hosts.shaper import NothingPasses, Shapers
from testbed_controller.lab import runstate
from testbed_controller.lab.clients import Agent
from testbed_controller.lab.containers import DeviceContainer, container_name
from testbed_controller.lab.engine import connect_to_run, ensure_engine
from testbed_controller.lab.engineaddress import chosen_engine
from testbed_controller.lab.health import Ending
from testbed_controller.lab.images import ensure_images
from testbed_controller.lab.lab import Lab, Progress, RunLab, check_devices, new_state, trial_of
from testbed_controller.lab.networks import network_name, subnet_of
from testbed_controller.lab.programimages import device_images
from testbed_controller.lab.reaper import Reaper

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

GOSSIP_SECONDS = 6.0
"""Within which the hosts of a swarm have heard from each other of new containers."""


class HostsLab(RunLab):
    """The containers and the network of one run over several hosts; to a run it is what a `Lab` is."""

    def __init__(self, state: runstate.RunState, trial: Trial, hosts: Mapping[str, Host], subnet: IPv4Network) -> None:
        """``hosts`` are those of the state; a keeper has to run on each."""
        super().__init__(state, trial, subnet)
        self._hosts = hosts
        self.lost: set[str] = set()
        """Hosts that have not been heard of, whose devices count as down; `_Changes` says which."""
        self._channels: dict[str, Channel] = {}
        self.parts: dict[str, Lab] = {}
        """The part on each host."""
        keeper = container_name(state.run, KEEPER)
        try:
            for name, host in hosts.items():
                channel = self._channels[name] = Channel(host, keeper)
                self.parts[name] = Lab(
                    host.client,
                    state,
                    trial,
                    subnet,
                    here=state.hosts[name],
                    url=channel.url,
                    clock=channel,
                )
        except BaseException:
            self._hang_up()
            raise

    @classmethod
    def create(
        cls,
        trial: Trial,
        hosts: Sequence[str],
        given: Mapping[str, str],
        *,
        links: str = "auto",
        progress: Progress | None = None,
        results: Path | None = None,
        keep: bool = False,
        placement: str = "by-load",
    ) -> HostsLab:
        """Do as `Lab.create` does, on the engines of these docker contexts; ``given`` places devices.

        Raises InputError and HostError as that, and where hosts do not answer or are not of one swarm.
        """
        say = progress or (lambda _text: None)
        check_devices(trial.experiment)
        reached = reach_all(hosts)
        managing = manager(reached)
        placed = placed_on(capacities(reached), trial.experiment, given, placement)
        # An engine of another machine that the user has chosen may be reached by ssh only, as hosts are.
        engine = chosen_engine()
        here = ensure_engine(say, engine) if engine.is_local else next(iter(reached.values())).client
        images = ensure_images(here, say)
        devices = device_images(here, trial.scenario.workload, trial.experiment, images, say)
        bring(here, reached.values(), [images.shaper, *devices.values()], say)
        there = {name: [device for device, host in placed.items() if host == name] for name in reached}
        state = new_state(trial, None, results, keep, hosts=there)
        reaper = Reaper(state.run, "testbed_controller.hosts.removal")
        with (
            reaper.guarding(partial(remove_everywhere, state.run, reached.values()), keep),
            ExitStack() as made,
        ):
            runstate.write(state)
            say("making the network")
            subnet = make_overlay(managing, reached.values(), state.run, trial.scenario.network.subnet, len(placed))
            with ThreadPoolExecutor(len(reached)) as pool:
                list(pool.map(lambda host: make_keeper(host, state, images.shaper), reached.values()))
            lab = cls(state, trial, reached, subnet)
            made.callback(lab._hang_up)
            say(f"starting {len(placed)} devices, and a shaper on each host")
            lab._each(lambda part: part.populate(devices, images.shaper, links, lambda _text: None))
            say("measuring the ways between the hosts")
            lab._subtract_ways()
            made.pop_all()
        if not keep:
            lab._reaper = reaper
            for name, part in lab.parts.items():
                threading.Thread(target=part.renew_leases, name=f"lease-{name}", daemon=True).start()
        return lab

    @classmethod
    def open(cls, run_id: str) -> HostsLab:
        """Find a run that is up, from any process; raises what `Lab.open` does."""
        state = runstate.read(run_id)
        reached = reach_all([*state.hosts])
        lab = cls(state, trial_of(state), reached, _overlay(manager(reached).client, run_id))
        lab.refresh()
        return lab

    # What a lab is

    @property
    def broadcast(self) -> str | None:
        """The data network's broadcast address; None where devices are on several hosts, which it does not reach."""
        return str(self.subnet.broadcast_address) if sum(map(bool, self._state.hosts.values())) == 1 else None

    @property
    def devices(self) -> MutableMapping[str, DeviceContainer]:
        """The devices of all hosts, in the order of the scenario."""
        found = ChainMap(*(part.devices for part in self.parts.values()))
        return {device.name: found[device.name] for device in self.experiment.devices if device.name in found}

    @cached_property
    def shaper(self) -> Shapers:
        """The shapers of all hosts, as if they were one."""
        parts = {name: part.shaper for name, part in self.parts.items()}
        return Shapers(parts, self._state, self._channels, self.experiment.links, self.lost)

    def refresh(self) -> None:
        """Look again what every container of the run is doing."""
        self._each(lambda part: part.refresh())

    def states(self) -> dict[str, str]:
        """Return in the engines' words what the container of each device is doing; ``lost`` on a host that is."""
        found = {name: device.state for name, device in self.devices.items()}
        self._each(lambda part: found.update(part.states()))
        return found

    def facts(self) -> dict[str, Any]:
        """Return what a run's manifest should say: of the first host as of one host, and of each by its name."""
        found = dict(zip(self.parts, self._each(lambda part: part.facts()), strict=True))
        for name, channel in self._channels.items():
            found[name] |= {"devices": self._state.hosts[name], "node": self._hosts[name].node}
            found[name] |= {"clock": channel.clock.facts()}
        return {**next(iter(found.values())), "hosts": found}

    def container_logs(self) -> dict[str, Iterator[bytes]]:
        """Return what each container of the run has written; the shaper of a host is ``shaper.HOST``."""
        logs: dict[str, Iterator[bytes]] = {}
        for host, part in self.parts.items():
            if host not in self.lost:
                found = part.container_logs()
                logs[f"{SHAPER}.{host}"] = found.pop(SHAPER)
                logs |= found
        return logs

    def agent(self, name: str) -> Agent:
        """Return the client of a device's agent."""
        return self._part(name).agent(name)

    def changes(self, on_return: Callable[[float], None]) -> _Changes:
        """Return what follows the containers of the run on all hosts."""
        return _Changes(self, on_return)

    def kill(self, name: str) -> None:
        """End the device's container at once."""
        self._part(name).kill(name)

    def start(self, name: str) -> None:
        """Switch the device on again."""
        self._part(name).start(name)

    def admit(self, name: str, links: Mapping[Pair, Link] | None = None) -> None:
        """Return when the links of a device that was switched on are shaped and its agent is healthy."""
        self._part(name).admit(name, None if links is None else self.shaper.imposed(links))

    def pause(self, name: str) -> None:
        """Freeze every process of the device."""
        self._part(name).pause(name)

    def resume(self, name: str) -> None:
        """Let a paused device go on."""
        self._part(name).resume(name)

    def ending(self, name: str, patience: float = 0.0) -> Ending | None:
        """Return how a container ended, else None; of the shapers, the first that has. See `Health.ending`."""
        if name != SHAPER:
            host = next(host for host, devices in self._state.hosts.items() if name in devices)
            return Ending(self.silence(host)) if host in self.lost else self.parts[host].ending(name, patience)
        for host, part in self.parts.items():
            if host not in self.lost and (ending := part.ending(name)) is not None:
                return replace(ending, text=f"of {host} {ending.text}")
        return None

    def down(self) -> bool:
        """Remove everything of the run from all hosts; see `Lab.down`. What a lost one has is removed in background."""
        for part in self.parts.values():
            part.over.set()
        lost = {name for name in self.lost if self._channels[name].silent > LOST_SECONDS}
        self._hang_up()
        return self._take_down(partial(remove_everywhere, self.run_id, self._hosts.values(), lost=lost))

    # Inside

    def _subtract_ways(self) -> None:
        """Have links across hosts delay by so much less as the ways between the hosts do."""
        deadline = time.monotonic() + GOSSIP_SECONDS
        while True:
            try:
                ways = self.shaper.measured_ways()
                break
            except NothingPasses as error:
                if time.monotonic() > deadline:
                    raise HostError(_narrow(*error.ends) if error.small else self._closed(*error.ends)) from None
        self._state = replace(self._state, ways=ways)
        runstate.write(self._state)
        del self.shaper
        self.shaper.set({pair: link for pair, link in self.experiment.links.items() if self.shaper.crosses(pair)})

    def _closed(self, source: str, destination: str) -> str:
        """Say which ports are closed where nothing passes from one host to another."""
        network = manager(self._hosts).client.api.inspect_network(network_name(self.run_id, "data"), verbose=True)
        peers = {str(each["IP"]) for each in network.get("Peers") or ()}
        ends = [self._hosts[source], self._hosts[destination]]
        ports = "UDP 4789" if all(each.address in peers for each in ends) else "TCP and UDP 7946, and UDP 4789"
        names = " and ".join(f"{each.name} ({each.address})" for each in ends)
        return (
            f"the overlay network carries nothing from {source} to {destination}: open {ports} between {names}; if "
            f"they are open, 'docker swarm leave' and 'join' {destination} again"
        )

    def _hang_up(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _part(self, device: str) -> Lab:
        for name, devices in self._state.hosts.items():
            if device in devices and name in self.lost:
                raise HostError(f"{device} {self.silence(name)}")
            if device in devices:
                return self.parts[name]
        known = ", ".join(each.name for each in self.experiment.devices)
        raise InputError(f"there is no device '{device}' in {self.run_id}: {known}")

    def silence(self, host: str) -> str:
        """Return what is to be said of something on a host that is lost."""
        silent = self._channels[host].silent
        return f"is on the host {host}, which has not been heard of for {silent:.1f} s: it is lost, or cut off"

    def _each(self, act: Callable[[Lab], T]) -> list[T]:
        """Do something at once on all hosts that are not lost; return what came of it, in the order of the hosts.

        Raises HostError naming the host where it fails.
        """

        def attempt(host: str) -> T:
            try:
                return act(self.parts[host])
            except HostError as error:
                raise HostError(f"on {host}: {error}") from error

        with ThreadPoolExecutor(len(self.parts)) as pool:
            return list(pool.map(attempt, [name for name in self.parts if name not in self.lost]))


def _overlay(client: docker.DockerClient, run_id: str) -> IPv4Network:
    """Return the subnet of a run's data network; raises InputError where that is gone."""
    try:
        return subnet_of(client, run_id, "data")
    except NotFound:
        text = f"the run '{run_id}' has no network any more: remove it with 'testbed down {run_id}'"
        raise InputError(text) from None


def _narrow(source: str, destination: str) -> str:
    return (
        f"small packets get from {source} to {destination}, and full frames of the overlay network, {MTU} bytes in "
        f"UDP, do not: the way between carries less than 1500 bytes: give both hosts' interfaces the MTU of that way "
        "('ip link set dev INTERFACE mtu ...'), or the way 1500"
    )


def capacities(hosts: Mapping[str, Host]) -> dict[str, Capacity]:
    """Return what each host has for devices."""
    return {name: Capacity(host.cores, host.memory) for name, host in hosts.items()}


def placed_on(
    hosts: Mapping[str, Capacity], experiment: Experiment, given: Mapping[str, str], placement: str
) -> dict[str, str]:
    """Return the host of each device; those of a radio cell, whose packets wait for each other, are on one."""
    cells = [cell.devices for cell in experiment.cells]
    return place(experiment.devices, experiment.links, hosts, given, cells, placement)


def struck(found: Sequence[Trial], where: LabPart) -> list[Trial]:
    """Return trials with the faults of hosts among their own; raises what `LabPart.struck` and `place` do."""
    there = capacities(reach_all(where.hosts))
    return [where.struck(each, placed_on(there, each.experiment, where.place, where.placement)) for each in found]


class _Changes:
    """What happens to containers on several hosts, as `ContainerChanges` says it of one, and to the hosts themselves.

    A host that is not heard of is lost, and its devices with it; one that is heard of again goes on as it is.
    """

    def __init__(self, lab: HostsLab, on_return: Callable[[float], None]) -> None:
        self._lab = lab
        self._on_return = on_return
        self._parts = {name: part.changes(on_return) for name, part in lab.parts.items()}
        self._found: queue.SimpleQueue[DeviceContainer | Exception | None] = queue.SimpleQueue()
        self._over = threading.Event()

    def __iter__(self) -> Iterator[DeviceContainer]:
        """Yield each container when it has changed; raises HostError where an engine does not answer any more."""
        for host, part in self._parts.items():
            threading.Thread(target=self._follow, args=(host, part), name="changes", daemon=True).start()
        threading.Thread(target=self._listen, name="hosts", daemon=True).start()
        while (found := self._found.get()) is not None:
            if isinstance(found, Exception):
                raise found
            yield found

    def _follow(self, host: str, part: Iterable[DeviceContainer]) -> None:
        try:
            for found in part:
                if host not in self._lab.lost:
                    self._found.put(found)
        except Exception as error:  # noqa: BLE001 - handed to whoever iterates
            if host not in self._lab.lost:
                self._found.put(error)

    def _listen(self) -> None:
        longest: dict[str, float] = {}
        while not self._over.wait(0.5):
            for host, channel in self._lab._channels.items():
                silent = channel.silent
                if silent > LOST_SECONDS:
                    longest[host] = silent
                    if host not in self._lab.lost:
                        self._lab.lost.add(host)
                        _LOG.info("the host %s is lost: silent for %.1f s", host, silent)
                        self._note(host, lambda found: replace(found, state="lost", control_url=""))
                elif host in self._lab.lost:
                    self._welcome(host, longest[host])

    def _note(self, host: str, change: Callable[[DeviceContainer], DeviceContainer]) -> None:
        part = self._lab.parts[host]
        for name, found in part.devices.items():
            part.devices[name] = change(found)
            self._found.put(part.devices[name])

    def _welcome(self, host: str, silent: float) -> None:
        """Take a host in again, unless its keeper has removed the run there: without a shaper it stays lost."""
        part = self._lab.parts[host]
        with suppress(HostError, DockerException, requests.RequestException):
            if part.ending(SHAPER) is None:
                part.refresh()
                self._lab.lost.discard(host)
                _LOG.info("the host %s answers again after %.1f s", host, silent)
                self._on_return(silent)
                self._note(host, lambda found: found)

    def close(self) -> None:
        """Let whoever iterates come to an end."""
        self._over.set()
        for part in self._parts.values():
            part.close()
        self._found.put(None)


AnyLab = Lab | HostsLab
"""What a run goes on."""


def create_lab(trial: Trial, where: LabPart, **options: Any) -> AnyLab:
    """Make a lab on this machine's engine, or on those of some hosts; options and errors are those of `Lab.create`."""
    if where.hosts:
        return HostsLab.create(trial, where.hosts, where.place, placement=where.placement, **options)
    return Lab.create(trial, **options)


def open_lab(run_id: str) -> AnyLab:
    """Find a run that is up, on one engine or on several; raises what `Lab.open` does."""
    return HostsLab.open(run_id) if runstate.hosts_of(run_id) else Lab.open(run_id)


def engine_of(run_id: str, device: str) -> docker.DockerClient:
    """Return the engine on which a device of a run is; raises HostError where it does not answer.

    A run that this user has not started is looked for on the engine that this user means.
    """
    hosts = runstate.hosts_of(run_id)
    if not hosts:
        return connect_to_run(run_id)
    at = next((host for host, devices in hosts.items() if device in devices), next(iter(hosts)))
    return reach(at).client
