"""The life of the device's program: idle, ready, running, finished, failed, stopped."""

from __future__ import annotations

import json
import logging
import threading
import time
import traceback
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from testbed.common.errors import TestbedError
from testbed.common.lazy import asyncio
from testbed.trace.events import Event
from testbed.wire import arrays, tensors
from testbed_agent.events import EventLog
from testbed_agent.http import Refused
from testbed_agent.pacing import Pace, WaitingTime
from testbed_agent.receiving import DataServer
from testbed_agent.settings import Settings

if TYPE_CHECKING:
    from testbed.wire.message import Message
    from testbed_agent.casting import Hears
    from testbed_agent.deployment import Deployment
    from testbed_agent.device import RealDevice
    from testbed_agent.loop import Loop

_LOG = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
"""Between two records of what the host kept a device waiting for."""
DISK_SECONDS = 2.0
"""Between two looks at how much a device keeps."""
MOST_SLOWNESS = 2_000_000.0
"""Seconds there and back that time-outs allow for, at most: what fits into the kernel's milliseconds."""
STOP_SECONDS = 3.0
"""How long a program may take to end once it is cancelled."""


class Runner:
    """Holds one deployment and runs its program in the event loop, a thread, in which its messages arrive too."""

    def __init__(self, settings: Settings, data: DataServer) -> None:
        self.settings = settings
        self.log = EventLog(settings.event_limit)
        self.pace = Pace()
        """Pace of the device's processors, from its boot on, whatever program runs."""
        self.state = "idle"
        self.error: str | None = None
        self.device: RealDevice | None = None
        """Device of the program that runs or ran last."""
        self._booted = time.monotonic()
        self._data = data
        self._lock = threading.RLock()
        self._deployment: Deployment | None = None
        self._message_loss: dict[str, float] = {}
        self._slowness: dict[str, float] = {}
        """Seconds that a few packets there and back take, by peer, with the links as they are now."""
        self._input: Any = None
        """The data of the device, as its kind of work reads them."""
        self._weights: dict[str, Any] | None = None
        self.computing: dict[str, Any] | None = None
        """The processor and the kernels that programs compute with; None before torch is imported."""
        self._task: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        """Waits for its end; kept here, since a loop forgets tasks that nobody holds."""
        self._begun: Loop | None = None
        self._beginning = threading.Lock()
        self._over = threading.Event()
        threading.Thread(target=self._await_peer, name="peers", daemon=True).start()

    def _loop(self) -> Loop:
        """Return the program's loop. It begins when a program or a peer needs it: asyncio takes an idle device 7 MB."""
        with self._beginning:
            if self._begun is None:
                from testbed_agent.loop import Loop

                self._begun = Loop()
                self._begun.call_soon(self._data.serve)
                threading.Thread(target=self._begun.live, name="program", daemon=True).start()
            return self._begun

    def _await_peer(self) -> None:
        """Let the first peer that comes be answered, also while no program runs."""
        self._data.wait()
        self._loop()

    def deploy(self, body: bytearray) -> None:
        """Replace the deployment and forget all data. Imports the libraries of the work for methods that need them.

        Raises `Refused` while a program runs, and for what is no deployment.
        """
        with self._lock:
            if self.state == "running":
                raise Refused(409, "cannot deploy while a program runs; stop it first")
            from testbed_agent import deployment

            self._deployment = deployment.read(body, self.settings)
            arrays.choose(self._deployment.work.arrays)
            if self._deployment.method.needs_torch:
                self.computing = self._deployment.work.prepare_device(self._deployment.problem)
            self._message_loss = dict(self._deployment.message_loss)
            self._slowness = {}
            self._follow_links({name: peer.slowness for name, peer in self._deployment.peers.items()})
            self._input = self._weights = self.error = None
            self.device = self._data.inbox = None
            self.log.reopen()
            self.state = "ready"
            _LOG.info("deployed: %s, peers %s", self._deployment.method.name, ", ".join(self._deployment.peers))

    def put_data(self, body: bytearray) -> None:
        """Keep the data set for the program, which is the lead's; raises `Refused` for what is none."""
        if self._deployment is None:  # the kind of work, which reads them, is not known
            self.needs_ready("data")
        assert self._deployment is not None
        try:
            data = self._deployment.work.read_data(body)
        except tensors.TensorError as error:
            raise Refused(400, str(error)) from error
        with self._lock:
            self.needs_ready("data")
            _LOG.info("received %d bytes of training and test samples", len(body))
            self._input = data

    def put_shard(self, body: bytearray) -> None:
        """Keep weights for the program to begin with; raises `Refused` for what is none."""
        try:
            weights = arrays.unpack(body)
        except tensors.TensorError as error:
            raise Refused(400, str(error)) from error
        with self._lock:
            self.needs_ready("a shard")
            _LOG.info("received %d bytes of initial weights", len(body))
            self._weights = weights

    def set_links(self, body: bytearray) -> None:
        """Adapt to links that have changed: JSON such as ``{"message_loss": {"a": 0.2}, "slowness": {"a": 4.0}}``.

        Of casts by ``message_loss`` that fraction is lost from now on; time-outs of connections allow for ``slowness``,
        the seconds that a few packets there and back take. Raises `Refused` before a deployment.
        """
        with self._lock:
            if self._deployment is None:
                raise Refused(409, "links come after a deployment")
            found = _link_changes(body, self._deployment.peers)
            _LOG.info("links have changed: %s", found)
            self._message_loss = {**self._message_loss, **found["message_loss"]}
            self._follow_links(found["slowness"])
            if self.device is not None:
                self.device.set_slowness(found["slowness"])

    def set_speed(self, factor: float) -> None:
        """Let the device compute at this share of its own speed from now on."""
        _LOG.info("computing at %g of the speed", factor)
        self.pace.set(factor)

    def _follow_links(self, slowness: Mapping[str, float]) -> None:
        self._slowness = {**self._slowness, **slowness}
        self._data.slowness = max(self._slowness.values(), default=0.0)

    def _hears(self, deployment: Deployment) -> Hears:
        """Return what decides what this device hears of a cast, with the links as they are at that moment."""
        from testbed.network.broadcast import heard, received

        problem, name = deployment.problem, self.settings.device

        def hears(message: Message, header: int, number: int) -> Message | None:
            sender = message.sender
            link = problem.links.get((sender, name))
            chance = partial(heard, problem.seed, sender, name, number, self._message_loss.get(sender, 0.0))
            return received(message, header, None if link is None else link.frame, chance)

        return hears

    def weights(self, part: bool = False) -> bytes:
        """Return the weights that the program exposes, as they are between two pieces of work.

        ``part``: those of the device's own part of the model. Raises `Refused` where there are none.
        """
        device = self.device
        found = device.between_works(device.exposed[part]) if device is not None and part in device.exposed else None
        if not found:
            raise Refused(409, "this device's program exposes no weights")
        return arrays.pack(found)

    def start(self, origin: float) -> None:
        """Run the program; ``origin`` is the monotonic instant at which the workload begins."""
        with self._lock:
            self.needs_ready("a start")
            assert self._deployment is not None
            self.state = "running"
            self._over.clear()
            _LOG.info("the program starts %.3f s after the origin of the run", time.monotonic() - origin)
            self._loop().call_soon_threadsafe(self._begin, self._deployment, origin)

    def stop(self) -> None:
        """Cancel the program and wait until it is over; raises `Refused` where none runs or it ignores that."""
        with self._lock:
            if self.state in ("idle", "ready"):
                raise Refused(409, f"no program runs: this device is {self.state}")
            _LOG.info("asked to stop, while the program is %s", self.state)
            self._loop().call_soon_threadsafe(self._cancel)
        if not self._over.wait(STOP_SECONDS):
            raise Refused(409, "the program ignores its cancellation; kill the device")

    def leave(self) -> None:
        """Notify the program that the device leaves; the controller switches it off once the program has returned."""
        with self._lock:
            _LOG.info("asked to leave")
            if self.device is not None:
                self.device.leaving = True

    def needs_ready(self, what: str) -> None:
        """Raise `Refused` unless there was a deployment and no start yet; ``what`` is asked for."""
        if self.state != "ready":
            raise Refused(409, f"{what} comes after a deployment and before the start; this device is {self.state}")

    @property
    def body_limit(self) -> int:
        """Bytes of a data set or a shard, at most: what the device's memory holds."""
        assert self._deployment is not None
        return int(self._deployment.problem.device(self.settings.device).memory)

    def _begin(self, deployment: Deployment, origin: float) -> None:
        self._task = self._loop().create_task(self._main(deployment, origin))
        self._ending = self._loop().create_task(self._end(self._task, origin))

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _end(self, program: asyncio.Task[None], origin: float) -> None:
        """Wait for the end of the program and of what it has left running."""
        await asyncio.wait([program])
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        self._loop().on_timer = lambda _: None
        failure = None if program.cancelled() else program.exception()
        state, error = "stopped" if program.cancelled() else "failed" if failure else "finished", None
        if isinstance(failure, TestbedError):
            error = str(failure)
        elif failure is not None:  # whatever ends a program is reported to the controller
            from testbed.common.usercode import located

            error = located(failure) or "".join(traceback.format_exception(failure))
        # For the device: what it computed last may be due a moment from now.
        now = time.monotonic() - origin if self.device is None else self.device.now()
        self._record(origin + now, origin, state, error)
        _LOG.log(logging.ERROR if failure else logging.INFO, "the program is %s", state, exc_info=failure)
        with self._lock:
            self.state, self.error, self._task = state, error, None
        self.log.close()
        self._over.set()

    async def _main(self, deployment: Deployment, origin: float) -> None:
        from testbed_agent.device import RealDevice

        settings, problem = self.settings, deployment.problem
        device = RealDevice(settings, deployment, origin, self.log, self.pace, self._hears(deployment), self._slowness)
        self._loop().on_timer = device.on_timer
        job = deployment.work.job(
            settings.device, problem, deployment.plan, self._input, self._weights, lambda: device.record("weights")
        )
        with self._lock:
            self.device = device
        self._record(max(origin, self._booted), origin, "up")
        self._data.inbox = device.inbox
        try:
            await asyncio.sleep(origin - time.monotonic())
            self._record(time.monotonic(), origin, "started")
            watch = asyncio.create_task(_watch(device))
            full = asyncio.create_task(_watch_disk(device, self._task))
            try:
                await deployment.method.program(device, job)
            except asyncio.CancelledError:
                if full.done():
                    full.result()  # raises what the program was ended for
                raise
            for task in (watch, full):
                task.cancel()
            await asyncio.wait([watch, full])
        except BaseException:
            self._data.inbox = None
            raise
        finally:
            # What still comes for a program that ended well is acknowledged and forgotten: the machine is on.
            device.close()

    def _record(self, instant: float, origin: float, state: str, error: str | None = None) -> None:
        fields: dict[str, Any] = {"state": state} if error is None else {"state": state, "error": error}
        self.log.append(Event(instant - origin, self.settings.device, "state", fields).to_json())


async def _watch(device: RealDevice) -> None:
    """Record now and then, and at the end, how long the processors worked for the device, and let it wait."""
    waiting = WaitingTime(without=device.processors.threads)

    def used() -> tuple[float, float, float]:
        return time.monotonic(), time.process_time(), device.processors.computed

    last = used()

    def record() -> None:
        nonlocal last
        before, last = last, used()
        interval, processor, computing = (now - then for now, then in zip(last, before, strict=True))
        device.record("host", waited=waiting.since_last(), interval=interval, processor=processor, computing=computing)

    try:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            record()
    finally:
        record()


async def _watch_disk(device: RealDevice, program: asyncio.Task[None] | None) -> None:
    """End the program where it keeps more than it may; raises `HostError` then."""
    while True:
        await asyncio.sleep(DISK_SECONDS)
        try:
            await asyncio.to_thread(device.disk.check)
        except TestbedError:
            if program is not None:
                program.cancel()
            raise


_LINK_CHANGES = {"message_loss": (1.0, "fraction from 0 to 1"), "slowness": (MOST_SLOWNESS, "number of seconds")}
"""Keys of a body of ``PUT /links``: the largest value, and the kind of value."""


def _link_changes(body: bytearray, peers: Collection[str]) -> dict[str, dict[str, float]]:
    """Read the values of `_LINK_CHANGES`, by peer; a key may be missing. Raises `Refused`."""
    try:
        document = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise Refused(400, 'the body is JSON such as {"message_loss": {"device": 0.2}}') from error
    if not isinstance(document, dict) or not document.keys() <= _LINK_CHANGES.keys():
        raise Refused(400, f"the body must have no keys but {', '.join(_LINK_CHANGES)}")
    found: dict[str, dict[str, float]] = {}
    for key, (most, kind) in _LINK_CHANGES.items():
        given = document.get(key, {})
        if not isinstance(given, dict):
            raise Refused(400, f"'{key}' must be a mapping from device to {kind}")
        for peer, value in given.items():
            if peer not in peers:
                raise Refused(400, f"'{peer}' is no peer of this device")
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                raise Refused(400, f"the {key} of '{peer}' must be a {kind}")
        found[key] = {peer: float(value) for peer, value in given.items()}
    return found
