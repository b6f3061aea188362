"""A run's devices and shaper as containers: made, found again, broken and removed."""

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
from testbed_controller.lab.clocks import Clock, EngineClock
from testbed_controller.lab.containers import (
    ControlUrl,
    DeviceContainer,
    container_logs,
    container_name,
    device_settings,
    device_url,
    look,
    make_container,
    published_url,
    shaper_settings,
)
from testbed_controller.lab.engine import connect, ensure_engine, facts, refuse_unusable
from testbed_controller.lab.engineaddress import EngineAddress, chosen_engine
from testbed_controller.lab.health import Health
from testbed_controller.lab.images import ensure_images
from testbed_controller.lab.memory import check_memory, too_small
from testbed_controller.lab.networks import data_subnet, device_addresses, make_control_network
from testbed_controller.lab.programimages import device_images
from testbed_controller.lab.reaper import Reaper
from testbed_controller.lab.removal import DEVICE, RUN, remove_run
from testbed_controller.shaping.plan import Endpoint

WORKERS = max(4, 2 * (os.cpu_count() or 1))
"""Containers made at once: more only queue up inside the engine."""
MINIMAL_MEMORY = 32 * 2**20
"""Bytes; in less the agent does not even start (an idle one needs some 25 MB, one with torch some 200 MB more)."""

LEASE_SECONDS = 1800.0
"""How long a container of a run lives without its controller; so long that no busy host ends a living run."""
RENEWAL_SECONDS = 60.0
PAUSE = 0.2
"""Seconds before the engine is asked again for its events, after it ended them."""

Progress = Callable[[str], None]


class RunLab:
    """What a lab knows of its run, whether it is on one engine or on several."""

    def __init__(self, state: runstate.RunState, trial: Trial, subnet: IPv4Network) -> None:
        self._state = state
        self._reaper: Reaper | None = None
        self.trial = trial
        self.experiment = trial.experiment
        self.subnet = subnet

    @property
    def run_id(self) -> str:
        """The run's id, which all its labels carry."""
        return self._state.run

    @property
    def token(self) -> str:
        """The secret of this run, of which those that agents and shaper ask for are made; no container has it."""
        return self._state.token

    def check_serves(self, trial: Trial) -> None:
        """Raise InputError where a trial needs other devices, links or images than are here."""
        now, wanted = self.experiment, trial.experiment
        names = [device.name for device in now.devices]
        programs = [programs_of(each.workload, names) for each in (now, wanted)]
        images = [{name: (part.image, part.packages) for name, part in found.items()} for found in programs]
        for key, same in (
            ("devices", now.devices == wanted.devices),
            ("network", (now.links, now.cells) == (wanted.links, wanted.cells)),
            ("workload.programs", not images[1] or images[0] == images[1]),
        ):
            if not same:
                text = f"{key}: not those that {self.run_id} was made of"
                raise InputError(f"{text}: change the workload alone, or 'testbed down' and 'testbed up' again")

    def note_results(self, results: Path) -> None:
        """Remember which folder the run that goes on here is written to."""
        self._state = replace(self._state, results=str(results))
        runstate.write(self._state)

    def _take_down(self, remove: Callable[[], object]) -> bool:
        """Remove the run; return False where that was interrupted or fails, and the reaper goes on with it."""
        reaper, self._reaper = self._reaper, None
        if reaper is not None:
            return reaper.remove(remove)
        remove()
        return True


class Lab(RunLab):
    """The containers and networks of one run on one engine."""

    def __init__(
        self,
        client: docker.DockerClient,
        state: runstate.RunState,
        trial: Trial,
        subnet: IPv4Network,
        *,
        here: Collection[str] | None = None,
        url: ControlUrl | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``here`` names the devices on this engine, where others are elsewhere.

        ``url`` says how containers are reached, ``clock`` is that of the engine's host where it is not this one.
        """
        super().__init__(state, trial, subnet)
        self._client = client
        self._url = url or self._through_shaper
        self._clock = clock
        names = [device.name for device in trial.experiment.devices]
        self._addresses = {name: str(address) for name, address in device_addresses(subnet, names).items()}
        self._here = [name for name in names if here is None or name in here]
        self.devices: dict[str, DeviceContainer] = {}
        self._shaper_url = ""
        self._agents: dict[str, Agent] = {}
        self.over = threading.Event()
        """Set when the lab is taken down."""
        self.health = Health(client, state.run, {device.name: device.memory for device in trial.experiment.devices})
        self.health.is_here = clock is None
        self.ending = self.health.ending
        """Returns how a container ended; see there."""

    # Making and finding

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
        """Make network, shaper and devices; return when all are healthy and every link is shaped.

        Leaves nothing behind when it fails or is interrupted. The lab is removed if this process dies before `down`,
        unless it is there to ``keep``. ``results`` is the folder that the run is written to.
        Raises HostError where there is no engine, no images, no room for the networks, or a container does not come
        up; InputError where the scenario's subnet does not fit.
        """
        say = progress or (lambda _text: None)
        check_devices(trial.experiment)
        engine = chosen_engine()
        client = ensure_engine(say, engine)
        refuse_unusable(client, engine)
        needs_torch = find_method(trial.scenario).needs_torch
        machine = facts(client)
        if text := too_small(trial.experiment.devices, torch=needs_torch):
            raise HostError(text)
        check_memory(trial.experiment.devices, machine["memory"], torch=needs_torch)
        if machine["unlimited"]:
            say(f"no device is held to limits on {', '.join(machine['unlimited'])}: see 'testbed doctor'")
        images = ensure_images(client, say)
        devices = device_images(client, trial.scenario.workload, trial.experiment, images, say)
        state = new_state(trial, run_id, results, keep, engine)
        reaper = Reaper(state.run)
        with reaper.guarding(partial(remove_run, client, state.run, settle=False), keep):
            runstate.write(state)
            lab = cls(client, state, trial, data_subnet(trial.scenario.network.subnet, len(trial.experiment.devices)))
            say("making the network")
            make_control_network(client, state.run, trial.scenario.network.control_subnet)
            lab.populate(devices, images.shaper, links, say)
        if not keep:
            lab._reaper = reaper
            threading.Thread(target=lab.renew_leases, name="lease", daemon=True).start()
        return lab

    @classmethod
    def open(cls, run_id: str) -> Lab:
        """Find a run that is up, from any process.

        Raises InputError where there is no such run; HostError where no engine answers.
        """
        state = runstate.read(run_id)
        client = connect(state.engine)
        trial = trial_of(state)
        subnet = data_subnet(trial.scenario.network.subnet, len(trial.experiment.devices))
        lab = cls(client, state, trial, subnet)
        lab.refresh()
        with contextlib.suppress(HostError):  # without a shaper no program is started or followed
            lab._compare_clocks()
        return lab

    def _compare_clocks(self) -> None:
        """Convert the times of the devices from now on where the engine's machine has another monotonic clock."""
        if self._clock is not None:
            return
        clock = EngineClock(lambda: float(self.shaper.facts()["monotonic"]))
        if clock.is_other:
            self._clock = clock
            self.health.is_here = False
            threading.Thread(target=clock.follow, args=(self.over,), name="clock", daemon=True).start()

    @property
    def broadcast(self) -> str:
        """The data network's broadcast address."""
        return str(self.subnet.broadcast_address)

    def refresh(self) -> None:
        """Look again what every container of the run is doing; one that has vanished is in state ``gone``."""
        self._shaper_url = self.look(SHAPER).control_url
        for name in self._here:
            self.devices[name] = look(self._client, self.run_id, name, self._addresses[name], self._url)

    def states(self) -> dict[str, str]:
        """Return in the engine's words what the container of each device is doing, all asked for at once."""
        filters = {"label": [f"{RUN}={self.run_id}", DEVICE]}
        found = self._client.api.containers(all=True, filters=filters)
        states = {str(each["Labels"][DEVICE]): str(each["State"]) for each in found}
        return {name: states.get(name, "gone") for name in self.devices}

    def facts(self) -> dict[str, Any]:
        """Return what a run's manifest should say of the engine, the images and the link backend."""
        found = self._client.api.containers(all=True, filters={"label": f"{RUN}={self.run_id}"})
        images = {str(each["Image"]): str(each["ImageID"]) for each in found}
        found = {"engine": facts(self._client), "images": images, "shaper": self.shaper.facts()}
        return found | ({"clock": self._clock.clock.facts()} if isinstance(self._clock, EngineClock) else {})

    def container_logs(self) -> dict[str, Iterator[bytes]]:
        """Return what each container of the run has written, by device, and by ``shaper``; read as it is iterated."""
        names = [*self._here, SHAPER]
        return {name: container_logs(self._client, self.run_id, name) for name in names}

    # Talking

    @cached_property
    def shaper(self) -> Shaper:
        """The client of the run's shaper."""
        return Shaper(self._shaper_url, self._state.token_of(SHAPER))

    def agent(self, name: str) -> Agent:
        """Return the client of a device's agent at its present port; raises `TestbedError` where the device is off."""
        url = self._device(name).control_url
        if not url:
            raise TestbedError(f"{name} is {self.devices[name].state}: nothing answers for it")
        known = self._agents.get(name)
        if known is None or known.url != url:
            known = self._agents[name] = Agent(url, self._state.token_of(name), name, self._clock)
        return known

    def changes(self, on_return: Callable[[float], None]) -> ContainerChanges:
        """Return what follows the containers of the run, the shaper's too; see there."""
        return ContainerChanges(self, on_return)

    # Breaking and mending

    def kill(self, name: str) -> None:
        """End the device's container at once, as a power cut would; nothing happens when it is down already."""
        device = self._device(name)
        with _unless(409, 404):
            self._client.api.kill(device.id, "SIGKILL")
        with _unless(404):
            self._client.api.wait(device.id, timeout=30)
        with contextlib.suppress(HostError):  # without a shaper there are no links either
            self.shaper.release()
        self.look(name)

    def start(self, name: str) -> None:
        """Switch the device on again; it has no links before `admit`. Raises `TestbedError` where that fails."""
        device = self._device(name)
        try:
            self._client.api.start(device.id)
        except NotFound:
            raise TestbedError(f"the container of {name} is gone: it cannot be started again") from None
        except APIError as error:
            raise HostError(f"{name} cannot be started: {error.explanation}") from error
        self.look(name)

    def admit(self, name: str, links: Mapping[Pair, Link] | None = None) -> None:
        """Return when the links of a device that was switched on are shaped and its agent is healthy.

        Its links are as they were last set, with whatever faults are in force; ``links`` changes them before.
        """
        device = self.look(self._device(name).name)
        self._attach([device], links or {})
        self.health.wait_for({name: device.control_url})
        self._note_targets()

    def _note_targets(self) -> None:
        """Write down where the devices' metrics are now: a device that booted again has another port."""
        urls = {name: device.control_url for name, device in self.devices.items() if device.control_url}
        runstate.write_targets(self._state, urls)

    def _attach(self, devices: Iterable[DeviceContainer], links: Mapping[Pair, Link]) -> None:
        """Have these devices' interfaces shaped."""
        specs = {spec.name: spec for spec in self.experiment.devices}
        endpoints = [
            Endpoint(
                each.name,
                each.pid,
                each.address,
                specs[each.name].uplink,
                specs[each.name].downlink,
                None if self._state.hosts else str(self.subnet),
            )
            for each in devices
        ]
        elsewhere = self._addresses.keys() - set(self._here)
        for name in sorted(elsewhere):
            endpoints.append(Endpoint(name, 0, self._addresses[name], specs[name].uplink, specs[name].downlink))
        self.shaper.attach(endpoints, links, self.experiment.seed, self.experiment.cells)

    def pause(self, name: str) -> None:
        """Freeze every process of the device; packets still reach its kernel."""
        device = self._device(name)
        with _unless(409):
            self._client.api.pause(device.id)
        self.look(name)

    def resume(self, name: str) -> None:
        """Let a paused device go on."""
        device = self._device(name)
        with _unless(409, 500):  # 500: 'is not paused', in older engines
            self._client.api.unpause(device.id)
        self.look(name)

    def down(self) -> bool:
        """Remove everything of the run, whatever is left of it.

        Returns False where that was interrupted or the engine does not answer: it goes on in the background.
        """
        self.over.set()
        return self._take_down(partial(remove_run, self._client, self.run_id, settle=False))

    def renew_leases(self) -> None:
        """Renew the lease of every container that runs, until the lab is taken down."""
        while not self.over.wait(RENEWAL_SECONDS):
            renewals = [self.shaper.renew]
            renewals += [self.agent(name).renew for name, found in list(self.devices.items()) if found.control_url]
            for renew in renewals:
                with contextlib.suppress(TestbedError):  # it is down by now, or busy: there are many more renewals
                    renew()

    # Inside

    def _device(self, name: str) -> DeviceContainer:
        try:
            return self.devices[name]
        except KeyError:
            raise InputError(f"there is no device '{name}' in {self.run_id}: {', '.join(self.devices)}") from None

    def look(self, name: str) -> DeviceContainer:
        """Note what a container is doing now, of a device or the shaper, and return it."""
        found = look(self._client, self.run_id, name, self._addresses.get(name, ""), self._url)
        if name in self.devices:
            self.devices[name] = found
        return found

    def _through_shaper(self, name: str, found: Mapping[str, Any]) -> str:
        if name == SHAPER:
            return published_url(found)
        return device_url(self._shaper_url, name) if found["State"]["Pid"] else ""

    def populate(self, images: Mapping[str, str], shaper_image: str, links: str, say: Progress) -> None:
        """Make and start all containers, shape the links as soon as every device has its network, await health."""
        settings = {SHAPER: shaper_settings(self._state, shaper_image, links)}
        settings |= {
            spec.name: device_settings(self._state, images[spec.name], spec, self._addresses)
            for spec in self.experiment.devices
            if spec.name in self._here
        }
        say(f"starting {len(settings) - 1} devices and the shaper")
        pool = ThreadPoolExecutor(WORKERS, "lab")
        try:
            made = [pool.submit(make_container, self._client, self.run_id, *each) for each in settings.items()]
            made[0].result()
            self._shaper_url = self.look(SHAPER).control_url
            self.health.wait_for({SHAPER: self._shaper_url}, published=not self._state.hosts)
            self._compare_clocks()
            for each in made:
                each.result()
            self.devices = {device.name: device for device in pool.map(self.look, self._here)}
        finally:
            # Requests under way are waited for, so that nothing appears after the clearing up.
            pool.shutdown(wait=True, cancel_futures=True)
        say("shaping the links")
        try:
            self._attach(self.devices.values(), self.experiment.links)
        except HostError:
            for name in self.devices:  # a device that has ended already is the better explanation
                self.health.check_alive(name)
            raise
        say("waiting for the devices")
        self.health.wait_for({name: device.control_url for name, device in self.devices.items()})
        self._note_targets()


def new_state(
    trial: Trial,
    run_id: str | None,
    results: Path | None,
    keep: bool,
    engine: EngineAddress | None = None,
    hosts: Mapping[str, list[str]] | None = None,
) -> runstate.RunState:
    """Return the state of a run that begins, with an id that no other run has unless one is given."""
    return runstate.RunState(
        run=run_id or runstate.new_id(trial.scenario.name),
        token=secrets.token_urlsafe(24),
        scenario=trial.scenario.model_dump(mode="json", by_alias=True, exclude_none=True),
        point=trial.point,
        repetition=trial.repetition,
        results=None if results is None else str(results),
        lease=None if keep else LEASE_SECONDS,
        engine=engine,
        hosts=dict(hosts or {}),
    )


def trial_of(state: runstate.RunState) -> Trial:
    """Return what a lab was made for."""
    trial = trials(Scenario.model_validate(state.scenario))[0]
    return replace(trial, point=state.point, repetition=state.repetition)


def check_devices(experiment: Experiment) -> None:
    """Raise InputError for a device in whose memory no agent starts, and for machines, which no container shares."""
    if experiment.machines:
        text = "machines: containers compute as if each had a machine of its own: leave this out, or run it with"
        raise InputError(f"{text} '--runtime simulate'")
    for device in experiment.devices:
        if device.memory < MINIMAL_MEMORY:
            raise InputError(
                f"devices: {device.name} has {format_size(device.memory)} of memory, in which no agent starts: give it "
                f"{format_size(MINIMAL_MEMORY)} at least, or run it with '--runtime simulate'"
            )


@contextlib.contextmanager
def _unless(*codes: int) -> Iterator[None]:
    """Pass over these refusals of the engine, which mean that it is so already; Podman has no number for that."""
    try:
        yield
    except APIError as error:
        if error.status_code not in codes and "container state improper" not in str(error.explanation):
            raise HostError(f"the engine refuses: {error.explanation}") from error


class ContainerChanges:
    """Follows the containers of a run, the shaper's too, whoever does something to them.

    An event of the engine says only that something changed; what the container is doing now is looked up. So nothing
    is missed where the engine itself was away for a while: all containers are looked at again once it answers.
    """

    def __init__(self, lab: Lab, on_return: Callable[[float], None]) -> None:
        """``on_return`` is called with the seconds for which the engine gave no events, once it does again."""
        self._lab = lab
        self._on_return = on_return
        self._last: dict[str, tuple[str, int]] = {}
        self._over = threading.Event()
        self._stream: Any = None

    def __iter__(self) -> Iterator[DeviceContainer]:
        """Yield each container as it is at first, and again when its state or its process has changed.

        Ends after `close`. Raises HostError where the engine does not answer any more.
        """
        lab = self._lab
        names = {container_name(lab.run_id, name): name for name in [*lab.devices, SHAPER]}
        filters = {
            "type": "container",
            # The last two are Podman's names.
            "event": ["start", "die", "pause", "unpause", "destroy", "died", "remove"],
            "label": f"{RUN}={lab.run_id}",
        }
        left = None
        while not self._over.is_set():
            with contextlib.suppress(requests.RequestException, HTTPError, OSError):
                self._stream = lab._client.events(decode=True, filters=filters)
                if left is not None:
                    self._on_return(time.monotonic() - left)
                    left = None
                for name in names.values():
                    yield from self._looked(name)
                for event in self._stream:
                    if name := names.get(event["Actor"]["Attributes"]["name"], ""):
                        yield from self._looked(name)
            left = left or time.monotonic()
            self._over.wait(PAUSE)

    def close(self) -> None:
        """Let whoever iterates come to an end."""
        self._over.set()
        if self._stream is not None:
            with contextlib.suppress(OSError, AttributeError):  # it is over already
                self._stream.close()

    def _looked(self, name: str) -> Iterator[DeviceContainer]:
        found = self._lab.look(name)
        if self._last.get(name) != (found.state, found.pid) and not self._over.is_set():
            self._last[name] = found.state, found.pid
            yield found
