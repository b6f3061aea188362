"""The life cycle of a device's program: idle, ready, running, and then finished, failed or stopped.

A device is idle until its first deployment, and ready until the start. After the end of a program, the device may get
another deployment.
"""

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
from testbed_agent.http import Refused, is_number
from testbed_agent.pacing import Pace, WaitingTime
from testbed_agent.receiving import DataServer
from testbed_agent.settings import Settings

if TYPE_CHECKING:
    from testbed.wire.message import Message
    from testbed_agent.casting import ReceiveFilter
    from testbed_agent.deployment import Deployment
    from testbed_agent.device import RealDevice
    from testbed_agent.loop import Loop

_LOG = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
"""Interval between records of the host's load, in seconds."""
DISK_SECONDS = 2.0
"""Interval between checks of the disk usage, in seconds."""
MOST_SLOWNESS = 2_000_000.0
"""Maximum round-trip time, in seconds, that time-outs allow for: the kernel stores milliseconds in 32 bits."""
STOP_SECONDS = 3.0
"""Time for a cancelled program to end, in seconds."""


class Runner:
    """The life cycle of a device's program, which shares an event loop with its messages in a separate thread.

    Methods are thread-safe: requests come from the threads of the control server. Example::

        runner = Runner(settings, DataServer(settings))
        runner.deploy(body)
        runner.start(origin=time.monotonic())
        runner.stop()
    """

    def __init__(self, settings: Settings, data: DataServer) -> None:
        self.settings = settings
        self.log = EventLog(settings.event_limit)
        self.pace = Pace()
        """Speed of the device's processors since its boot, for all programs."""
        self.state = "idle"
        self.error: str | None = None
        self.device: RealDevice | None = None
        """Device of the running program, or of the latest one."""
        self._booted = time.monotonic()
        self._data = data
        self._lock = threading.RLock()
        self._deployment: Deployment | None = None
        self._message_loss: dict[str, float] = {}
        """Current fraction of each peer's broadcasts that this device loses."""
        self._slowness: dict[str, float] = {}
        """Current round-trip time of a few packets to each peer, in seconds."""
        self._samples: Any = None
        """The device's data, as decoded by its kind of work (`testbed.workload.Workload.read_data`)."""
        self._weights: dict[str, Any] | None = None
        self.computing: dict[str, Any] | None = None
        """The processor and the compute kernels of programs; None before torch is imported."""
        self._task: asyncio.Task[None] | None = None
        """The task of the running program."""
        self._finish_task: asyncio.Task[None] | None = None
        """The task that waits for the program's end; stored because event loops hold only weak references to tasks."""
        self._loop: Loop | None = None
        """The program's event loop; None until the first call of `_start_loop`."""
        self._loop_lock = threading.Lock()
        """Guards the creation of the loop, since two threads may need the loop first."""
        self._program_ended = threading.Event()
        """Set when the program has ended; cleared at its start."""
        threading.Thread(target=self._await_peer, name="peers", daemon=True).start()

    def health(self) -> dict[str, Any]:
        """Return the device's state, with the traceback of a failed program."""
        document = {
            "run": self.settings.run,
            "device": self.settings.device,
            "state": self.state,
            "events": self.log.count,
        }
        if self.error is not None:
            document["error"] = self.error
        return document

    def _start_loop(self) -> Loop:
        """Return the program's loop, which starts on demand: asyncio takes 7 MB, too much for an idle device."""
        with self._loop_lock:
            if self._loop is None:
                from testbed_agent.loop import Loop

                self._loop = Loop()
                self._loop.call_soon(self._data.serve)
                threading.Thread(
                    target=self._loop.run_until_exit, name="program", daemon=True
                ).start()
            return self._loop

    def _await_peer(self) -> None:
        """Start the loop when the first peer connects, even if no program is running."""
        self._data.wait()
        self._start_loop()

    def deploy(self, body: bytearray) -> None:
        """Replace the deployment, discard all data, and import torch if the method needs torch.

        Raises `Refused` while a program is running, and for an invalid deployment.
        """
        with self._lock:
            if self.state == "running":
                raise Refused(
                    409,
                    "cannot deploy while a program is running: stop the program first",
                )
            # Imported on demand: an idle device must not hold the memory of pydantic and the core.
            from testbed_agent.deployment import read_deployment

            deployment = read_deployment(body, self.settings)
            self._deployment = deployment
            arrays.choose(deployment.work.arrays)
            if deployment.method.needs_torch:
                # Importing torch takes seconds, which must have passed before the workload starts.
                self.computing = deployment.work.prepare_device(deployment.problem)
            self._message_loss = dict(deployment.message_loss)
            self._slowness = {}
            self._set_slowness(
                {name: peer.slowness for name, peer in deployment.peers.items()}
            )
            self._samples = None
            self._weights = None
            self.error = None
            self.device = None
            self._data.inbox = None
            self.log.reopen()
            self.state = "ready"
            peers = ", ".join(deployment.peers)
            _LOG.info("deployed: %s, peers %s", deployment.method.name, peers)

    def put_data(self, body: bytearray) -> None:
        """Store the device's samples for its program; raises `Refused` for invalid data."""
        # The format of the data depends on the deployment.
        if self._deployment is None:
            self.require_ready("data")
        assert self._deployment is not None
        try:
            data = self._deployment.work.read_data(body)
        except tensors.TensorError as error:
            raise Refused(400, str(error)) from error
        with self._lock:
            # Checked again, since the data was decoded without the lock, so that `health` and `stop` need not wait.
            self.require_ready("data")
            _LOG.info("received %d bytes of training and test samples", len(body))
            self._samples = data

    def put_shard(self, body: bytearray) -> None:
        """Store the device's shard, its part of the initial weights; raises `Refused` for invalid weights."""
        try:
            weights = arrays.unpack(body)
        except tensors.TensorError as error:
            raise Refused(400, str(error)) from error
        with self._lock:
            self.require_ready("a shard")
            _LOG.info("received %d bytes of initial weights", len(body))
            self._weights = weights

    def set_links(self, body: bytearray) -> None:
        """Adapt to changed links, given as JSON: ``{"message_loss": {"a": 0.2}, "slowness": {"a": 4.0}}``.

        ``message_loss`` is the fraction of lost broadcasts from now on; ``slowness`` is the round-trip time of a few
        packets in seconds, which extends the time-outs of connections. Raises `Refused` before a deployment.
        """
        with self._lock:
            if self._deployment is None:
                raise Refused(409, "links can be set only after a deployment")
            changes = _parse_link_changes(body, self._deployment.peers)
            _LOG.info("links have changed: %s", changes)
            self._message_loss = {**self._message_loss, **changes["message_loss"]}
            self._set_slowness(changes["slowness"])
            if self.device is not None:
                self.device.set_slowness(changes["slowness"])

    def set_speed(self, factor: float) -> None:
        """Compute at a share of the device's own speed from now on."""
        _LOG.info("computing at %g times the device's own speed", factor)
        self.pace.set(factor)

    def _set_slowness(self, slowness: Mapping[str, float]) -> None:
        self._slowness = {**self._slowness, **slowness}
        self._data.slowness = max(self._slowness.values(), default=0.0)

    def _receive_filter(self, deployment: Deployment) -> ReceiveFilter:
        """Return a function that loses broadcasts according to the current links."""
        from testbed.network.broadcast import is_received, received_part

        problem = deployment.problem
        name = self.settings.device

        def filter_message(
            message: Message, header: int, number: int
        ) -> Message | None:
            sender = message.sender
            link = problem.links.get((sender, name))
            chance = partial(
                is_received,
                problem.seed,
                sender,
                name,
                number,
                self._message_loss.get(sender, 0.0),
            )
            frame = None if link is None else link.frame
            return received_part(message, header, frame, chance)

        return filter_message

    def weights(self, *, part: bool = False) -> bytes:
        """Return the weights exposed by the program, in their state between two tasks.

        With ``part``, only the weights of the device's own part of the model. Raises `Refused` if the program exposes
        none.
        """
        device = self.device
        if device is None or part not in device.exposed:
            raise Refused(409, "this device's program exposes no weights")
        exposed = device.between_works(device.exposed[part])
        if not exposed:
            raise Refused(409, "this device's program exposes no weights")
        return arrays.pack(exposed)

    def start(self, origin: float) -> None:
        """Run the program from ``origin`` on, the monotonic instant at which the workload begins on all devices."""
        with self._lock:
            self.require_ready("a start")
            assert self._deployment is not None
            self.state = "running"
            self._program_ended.clear()
            _LOG.info(
                "the program starts %.3f s after the origin of the run",
                time.monotonic() - origin,
            )
            self._start_loop().call_soon_threadsafe(
                self._start_program, self._deployment, origin
            )

    def stop(self) -> None:
        """Cancel the program and wait for its end; raises `Refused` if none is running or the program ignores it."""
        with self._lock:
            if self.state in ("idle", "ready"):
                raise Refused(
                    409, f"no program is running: this device is {self.state}"
                )
            _LOG.info("asked to stop, while the program is %s", self.state)
            self._start_loop().call_soon_threadsafe(self._cancel_program)
        if not self._program_ended.wait(STOP_SECONDS):
            raise Refused(409, "the program ignored its cancellation: kill the device")

    def leave(self) -> None:
        """Request a graceful shutdown of the program; the controller then stops the device."""
        with self._lock:
            _LOG.info("asked to leave")
            if self.device is not None:
                self.device.leaving = True

    def require_ready(self, request: str) -> None:
        """Raise `Refused` unless the device is deployed and not started; ``request`` appears in the error."""
        if self.state != "ready":
            raise Refused(
                409,
                f"{request} is accepted only between deployment and start; this device is {self.state}",
            )

    @property
    def body_limit(self) -> int:
        """Maximum size of a data set or of weights in bytes: the memory of the device."""
        assert self._deployment is not None
        return int(self._deployment.problem.device(self.settings.device).memory)

    def _start_program(self, deployment: Deployment, origin: float) -> None:
        self._task = self._start_loop().create_task(
            self._run_program(deployment, origin)
        )
        self._finish_task = self._start_loop().create_task(
            self._finish(self._task, origin)
        )

    def _cancel_program(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _finish(self, program: asyncio.Task[None], origin: float) -> None:
        """Wait for the program and all remaining tasks to end, and report the result."""
        await asyncio.wait([program])
        remaining = asyncio.all_tasks() - {asyncio.current_task()}
        for task in remaining:
            task.cancel()
        await asyncio.gather(*remaining, return_exceptions=True)
        self._start_loop().on_timer = lambda _: None
        failure = None
        if program.cancelled():
            state = "stopped"
        else:
            failure = program.exception()
            state = "finished" if failure is None else "failed"
        error = None if failure is None else _describe_failure(failure)
        # The device's clock may be ahead of the monotonic clock, since the last result may be due a moment from now.
        now = time.monotonic() - origin if self.device is None else self.device.now()
        self._record(origin + now, origin, state, error)
        _LOG.log(
            logging.ERROR if failure else logging.INFO,
            "the program is %s",
            state,
            exc_info=failure,
        )
        with self._lock:
            self.state = state
            self.error = error
            self._task = None
        # The state is set before the log is closed, since clients query the state after the end of the events.
        self.log.close()
        self._program_ended.set()

    async def _run_program(self, deployment: Deployment, origin: float) -> None:
        from testbed_agent.device import RealDevice

        settings = self.settings
        problem = deployment.problem
        device = RealDevice(
            settings,
            deployment,
            origin,
            self.log,
            self.pace,
            self._receive_filter(deployment),
            self._slowness,
        )
        self._start_loop().on_timer = device.on_timer
        context = deployment.work.program_context(
            settings.device,
            problem,
            deployment.plan,
            self._samples,
            self._weights,
            lambda: device.record("weights"),
        )
        with self._lock:
            self.device = device
        self._record(max(origin, self._booted), origin, "up")
        # The inbox accepts messages before the origin, because devices start at slightly different instants, and the
        # message of an early device must not be refused.
        self._data.inbox = device.inbox
        try:
            await asyncio.sleep(origin - time.monotonic())
            self._record(time.monotonic(), origin, "started")
            watch = asyncio.create_task(_record_host_load(device))
            quota = asyncio.create_task(_enforce_disk_quota(device, self._task))
            try:
                await deployment.method.program(device, context)
            except asyncio.CancelledError:
                if quota.done():
                    quota.result()  # raises the error that caused the cancellation
                raise
            for task in (watch, quota):
                task.cancel()
            # The watch records the host's load once more, before the end of the program is recorded.
            await asyncio.wait([watch, quota])
        except BaseException:
            self._data.inbox = None
            raise
        finally:
            # After a normal end, the inbox stays, since a device that is on acknowledges messages.
            device.close()

    def _record(
        self, instant: float, origin: float, state: str, error: str | None = None
    ) -> None:
        fields: dict[str, Any] = {"state": state}
        if error is not None:
            fields["error"] = error
        event = Event(instant - origin, self.settings.device, "state", fields)
        self.log.append(event.to_json())


def _describe_failure(failure: BaseException) -> str:
    """Return the message of a failed program, with a traceback unless the error explains itself."""
    if isinstance(failure, TestbedError):
        return str(failure)
    from testbed.common.usercode import describe_error

    return describe_error(failure) or "".join(traceback.format_exception(failure))


async def _record_host_load(device: RealDevice) -> None:
    """Record processor use and waiting times of the host, periodically and at the end."""
    waiting = WaitingTime(excluded_threads=device.processors.threads)

    def read_times() -> tuple[float, float, float]:
        return time.monotonic(), time.process_time(), device.processors.computed

    latest = read_times()

    def record() -> None:
        nonlocal latest
        before = latest
        latest = read_times()
        device.record(
            "host",
            waited=waiting.since_last(),
            interval=latest[0] - before[0],
            processor=latest[1] - before[1],
            computing=latest[2] - before[2],
        )

    try:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            record()
    finally:
        record()


async def _enforce_disk_quota(
    device: RealDevice, program: asyncio.Task[None] | None
) -> None:
    """Cancel the program if the disk usage exceeds the quota; raises `HostError` then."""
    while True:
        await asyncio.sleep(DISK_SECONDS)
        try:
            await asyncio.to_thread(device.disk.check)
        except TestbedError:
            if program is not None:
                program.cancel()
            raise


_LINK_CHANGES = {
    "message_loss": (1.0, "fraction from 0 to 1"),
    "slowness": (MOST_SLOWNESS, "number of seconds"),
}
"""Keys of ``PUT /links``, with their maximum and the description of a value."""


def _parse_link_changes(
    body: bytearray, peers: Collection[str]
) -> dict[str, dict[str, float]]:
    """Return the values of `_LINK_CHANGES` by peer; keys are optional. Raises `Refused`."""
    try:
        document = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise Refused(
            400, 'the body must be JSON such as {"message_loss": {"device": 0.2}}'
        ) from error
    if not isinstance(document, dict) or not document.keys() <= _LINK_CHANGES.keys():
        raise Refused(
            400, f"the body must be an object with the keys {', '.join(_LINK_CHANGES)}"
        )
    changes: dict[str, dict[str, float]] = {}
    for key, (maximum, kind) in _LINK_CHANGES.items():
        values = document.get(key, {})
        if not isinstance(values, dict):
            raise Refused(400, f"'{key}' must be a mapping from device to {kind}")
        for peer, value in values.items():
            if peer not in peers:
                raise Refused(
                    400,
                    f"unknown peer '{peer}'; the peers are {', '.join(sorted(peers))}",
                )
            if not is_number(value, 0, maximum):
                raise Refused(400, f"the {key} of '{peer}' must be a {kind}")
        changes[key] = {peer: float(value) for peer, value in values.items()}
    return changes
