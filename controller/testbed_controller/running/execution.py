"""The control loop of an active run: it compares the desired with the observed state and acts on the difference.

The desired state of links, speeds and devices follows from the scenario, its faults and traces, and manual commands;
`DockerFaultTarget` applies and stores it. The observed state comes from the engine (`lab.changes`) and the agents. A
running device whose program does not report events gets its links and its program, whoever started the device. The
method's recovery deals with a device that ended. The run fails if the shaper ends, or if a fault stops the coordinator
and no later fault restarts it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from testbed.common.errors import HostError, TestbedError
from testbed.deployment import deployments
from testbed.faults.conditions import RecordedStep, StateDiff, apply_step
from testbed.faults.script import SCRIPTED, FaultOperation, FaultScript, LinkTraceScript
from testbed.network.checks import SHAPER
from testbed.prepare import Prepared
from testbed.trace.events import TESTBED, Event
from testbed.trace.log import EventLog
from testbed.trace.outcome import (
    UNGATHERED,
    Outcome,
    Status,
    ended,
    without_coordinator,
)
from testbed_controller.hosts.lab import AnyLab
from testbed_controller.lab.clients import WORK_SECONDS, AgentGone
from testbed_controller.lab.containers import DeviceContainer
from testbed_controller.lab.health import Ending
from testbed_controller.running import control
from testbed_controller.running.machines import (
    DockerFaultTarget,
    change_events,
    step_events,
)

_LOG = logging.getLogger(__name__)

START_SECONDS = 0.2
"""Time from the first start request to the common origin, in seconds: by then every agent has received its request."""
START_SECONDS_EACH = 0.01
"""Additional time for each device, in seconds."""
GATHER_SECONDS = 2.0
"""Time for the last events of the devices after the end of the coordinator's program, in seconds."""
DEATH_SECONDS = 3.0
"""Time for the engine to report the end of a device that does not answer before the start, in seconds."""
UNGATHERED_SECONDS = 60.0
"""Time for a device to return its weights after a failed run, in seconds."""
WORKERS = 16
"""Maximum number of concurrent faults and boots: a restart takes a while and must not delay others."""
T = TypeVar("T")
End = tuple[Status, str | None]
"""The status of an ended run, and the error if any."""


def _unique_processors(
    computing: Iterable[dict[str, Any] | None],
) -> list[dict[str, Any]]:
    """Return each combination of processor and compute kernels once."""
    combinations: list[dict[str, Any]] = []
    for entry in computing:
        if entry is not None and entry not in combinations:
            combinations.append(entry)
    return combinations


class KeyedExecutor:
    """An executor for jobs with keys: equal keys run in order, others concurrently.

    A waiting job occupies a worker of the pool. No deadlock can occur, since the pool begins jobs in the order of
    submission: the earlier job, for which this job waits, has already begun.

    >>> with ThreadPoolExecutor() as pool:
    ...     executor = KeyedExecutor(pool)
    ...     executor.submit("worker1", lambda: print("kill"))
    ...     executor.submit("worker1", lambda: print("restart"))
    kill
    restart
    """

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._last_jobs: dict[Hashable, Future[None]] = {}
        """The job submitted last, by key."""

    def submit(self, key: Hashable, job: Callable[[], None]) -> None:
        """Run a job after all earlier ones with the same key."""
        predecessor = self._last_jobs.get(key)

        def run_after_predecessor() -> None:
            if predecessor is not None:
                wait([predecessor])
            job()

        self._last_jobs[key] = self._pool.submit(run_after_predecessor)


class Execution:
    """One run of a method's programs in a running lab."""

    def __init__(
        self,
        lab: AnyLab,
        prepared: Prepared,
        data: Any,
        weights: Mapping[str, Any] | None,
        on_event: Callable[[Event], None],
    ) -> None:
        self._lab = lab
        self._prepared = prepared
        self._coordinator = prepared.plan.coordinator
        addresses = {name: container.address for name, container in lab.devices.items()}
        self._deployments = deployments(
            prepared, lab.run_id, lab.token, addresses, lab.broadcast
        )
        self._inputs = prepared.workload.inputs(prepared, data, weights)
        self._on_event = on_event
        self._news: queue.SimpleQueue[Event | Callable[[], End | None]] = (
            queue.SimpleQueue()
        )
        """Input of the loop in `_follow`: events, and functions that handle any other news and may end the run."""
        self._events = EventLog()
        self._script = FaultScript(prepared.scenario.faults)
        self._link_trace = LinkTraceScript(prepared.experiment.changes)
        self._fault_target = DockerFaultTarget(lab, self._admit)
        devices = prepared.experiment.devices
        self._speeds = {device.name: device.speed for device in devices}
        self._origin = 0.0
        """Start of the workload on this machine's monotonic clock; `Agent` converts it to the clock of a device's
        host."""
        self._listeners: dict[str, tuple[int, threading.Thread]] = {}
        """For each device whose program reports events: the process ID of its container, and the thread that receives
        the events."""
        self._computing: dict[str, dict[str, Any] | None] = {}
        """Processor and compute kernels of each device."""
        self._pool = ThreadPoolExecutor(max(WORKERS, len(lab.devices)), "run")
        self._admission_locks = {name: threading.Lock() for name in lab.devices}
        self._run_ended = threading.Event()
        self._engine_absence = ""
        """The latest absence of the engine, as a suffix of messages; empty if the engine was never absent."""

    def run(self, on_stage: Callable[[str], None]) -> Outcome:
        """Deploy and start the programs, apply faults, and follow the run until the coordinator finishes."""
        # A single thread applies trace changes, since two changes of one link must keep their order.
        with self._pool as pool, ThreadPoolExecutor(1, "trace") as trace_pool:
            deployed = self._deploy_all()
            on_stage("running")
            self._lab.shaper.host_load(reset=True)
            processor_seconds_before = time.process_time()
            self._record_initial_state()
            # The run begins with the first values of a trace.
            initial = self._link_trace.pop_due(0.0)
            changed = apply_step(initial, self._fault_target)
            self._record_result(initial, began=0.0, actual=0.0, changed=changed)
            self._start_all(deployed)
            # Container changes are followed only after all programs have started, because the loop starts a program on
            # each device that the engine reports as running and that has none.
            container_changes = self._lab.changes(self._record_engine_absence)
            threading.Thread(
                target=self._follow_containers,
                args=(container_changes,),
                name="changes",
                daemon=True,
            ).start()
            try:
                with control.serve_requests(self._lab.run_id, self._answer_command):
                    status, error = self._follow(
                        KeyedExecutor(pool), KeyedExecutor(trace_pool)
                    )
            except KeyboardInterrupt:
                status, error = "interrupted", "stopped by the user"
            finally:
                self._run_ended.set()
                container_changes.close()
        status, error = ended(
            status, error, self._events, weights_given=self._inputs.begins_with_weights
        )
        fidelity: dict[str, Any] = {
            "controller_seconds": time.process_time() - processor_seconds_before
        }
        with suppress(HostError):  # the end of the shaper may have ended the run
            fidelity |= self._lab.shaper.host_load()
        # Weights are fetched before the programs are stopped, since the programs expose them.
        weights, parts, lost_results = self._collect_weights(status)
        if lost_results:
            fidelity["lost"] = lost_results
        self._stop_all()
        return Outcome(
            runtime="emulate",
            status=status,
            error=error,
            events=self._events.ordered(),
            weights_file=weights,
            parts=parts,
            host={"computing": _unique_processors(self._computing.values())},
            fidelity=fidelity,
        )

    # Programs

    def _deploy_all(self) -> dict[str, int]:
        """Deploy all programs; return the result of `_deploy` for each device that is not down."""

        def deploy(name: str) -> int | None:
            return self._call_unless_down(name, partial(self._deploy, name))

        deployed = {}
        counts = self._pool.map(deploy, self._lab.devices)
        for name, count in zip(self._lab.devices, counts, strict=True):
            if count is not None:
                deployed[name] = count
        return deployed

    def _start_all(self, deployed: Mapping[str, int]) -> None:
        """Start the programs of all ``deployed`` devices at a common origin in the near future."""
        seconds_until_origin = START_SECONDS + START_SECONDS_EACH * len(deployed)
        self._origin = time.monotonic() + seconds_until_origin

        def start(name: str) -> None:
            self._call_unless_down(
                name, partial(self._start_program, name, deployed[name])
            )

        list(self._pool.map(start, deployed))

    def _call_unless_down(self, name: str, act: Callable[[], T]) -> T | None:
        """Return the result of a function using a device; None if the device is down.

        Raises `TestbedError` if the device is the coordinator or has run out of memory. The run starts without any
        other device that is down, and the method recovers from its loss.
        """
        try:
            return act()
        except AgentGone as error:
            _LOG.info("%s does not respond before the start: %s", name, error)
            ending = self._lab.ending(name, DEATH_SECONDS)
            if ending is not None and ending.out_of_memory:
                raise TestbedError(f"{name} {ending.text}") from error
            if name == self._coordinator:
                raise TestbedError(
                    f"{name} coordinates the run and went down before the start: {error}"
                ) from error
            self._log_message(f"{name} is down as the run starts")
            return None

    def _deploy(self, name: str) -> int:
        """Deploy the program; return the number of events recorded by the device in earlier runs."""
        agent = self._lab.agent(name)
        answer = agent.deploy(self._deployments.of(name))
        earlier_events = int(answer["events"])
        self._computing[name] = answer.get("computing")
        # The deployment has the links of the scenario, so later changes of the links must be sent after it.
        self._fault_target.inform(name)
        data = self._inputs.data(name)
        if data is not None:
            agent.put_data(data)
        weights = self._inputs.weights(name)
        if weights is not None:
            agent.put_shard(weights)
        _LOG.info("deployed %s", name)
        return earlier_events

    def _start_program(self, name: str, earlier_events: int) -> None:
        pid = self._lab.devices[name].pid
        self._lab.agent(name).start(self._origin)
        _LOG.info("started the program of %s", name)
        listener = threading.Thread(
            target=self._follow_device,
            args=(name, pid, earlier_events),
            name=f"events-{name}",
            daemon=True,
        )
        self._listeners[name] = (pid, listener)
        listener.start()

    def _admit(self, name: str) -> None:
        """Shape the links of a started device and start the device's program, unless already running."""
        # A lock for each device, because two threads may admit it at the same time: one applies a fault that restarts
        # the device, the other handles the engine's report about this start.
        with self._admission_locks[name]:
            device = self._lab.devices[name]
            if device.state == "running" and not self._is_reporting(device):
                self._lab.admit(name, self._fault_target.links())
                self._start_program(name, self._deploy(name))

    def _is_reporting(self, device: DeviceContainer) -> bool:
        if device.name not in self._listeners:
            return False
        # A restarted device has another process ID, and its program does not report events yet.
        pid, _ = self._listeners[device.name]
        return pid == device.pid

    def _follow_device(self, name: str, pid: int, received: int) -> None:
        """Forward a device's events from number ``received`` on, until the program ends or the device restarts."""
        problem = ""
        # The process ID of a stopped container is 0.
        while not self._run_ended.is_set() and self._lab.devices[name].pid in (0, pid):
            try:
                for event in self._lab.agent(name).events(received):
                    received += 1
                    self._news.put(event)
                return
            except TestbedError as error:
                # The device is killed, paused or removed, which is not an error of the run.
                if str(error) != problem:
                    problem = str(error)
                    text = "the events of %s are interrupted after %d: %s"
                    _LOG.info(text, name, received, problem)
            self._run_ended.wait(0.1)

    def _follow_containers(self, containers: Iterable[DeviceContainer]) -> None:
        """Forward the container changes reported by the engine."""
        try:
            for container in containers:
                self._news.put(partial(self._react_to_container, container))
        except Exception as error:  # noqa: BLE001 - without the engine, the run cannot be observed
            _LOG.info("the containers can no longer be followed", exc_info=True)
            end: End = ("failed", str(error))
            self._news.put(lambda: end)

    def _record_engine_absence(self, seconds: float) -> None:
        """Record an absence of the engine: some seconds without reports of container changes."""
        _LOG.info("the engine gave no events for %.1f s", seconds)
        self._engine_absence = (
            f" while the container engine was away for {seconds:.1f} s"
        )
        self._log_message(self._engine_absence.removeprefix(" while "))

    def _answer_command(self, request: control.Request) -> control.Answer:
        """Execute a manual command and record the events."""

        def record(step: RecordedStep, changed: StateDiff) -> None:
            now = max(0.0, self._now())
            for event, fields in step_events(step, changed, self._speeds):
                self._news.put(Event(now, TESTBED, event, fields))

        return control.answer_request(request, self._fault_target, record)

    # The loop

    def _now(self) -> float:
        return time.monotonic() - self._origin

    def _log_message(self, text: str) -> None:
        # The time of the run begins with the common start of the programs.
        now = max(0.0, self._now()) if self._origin else 0.0
        self._news.put(Event(now, TESTBED, "log", {"text": text}))

    def _follow(
        self, fault_executor: KeyedExecutor, trace_executor: KeyedExecutor
    ) -> End:
        """Process events, faults and trace changes until the run ends; return the run's status and error.

        Faults and trace changes take time, so other threads apply them and put the results into ``_news``.
        """
        limit = self._prepared.scenario.time_limit
        while True:
            deadline = self._next_deadline(limit)
            operations: list[FaultOperation] = []
            with suppress(queue.Empty):
                news = self._news.get(timeout=max(0.0, deadline - self._now()))
                if isinstance(news, Event):
                    operations = self._script.observe(
                        news.time, news.device, news.event, news.fields
                    )
                    self._log(news)
                    end = self._end_from_event(news)
                else:
                    end = news()
                if end is not None:
                    return end
            for operation in operations + self._script.pop_due(self._now()):
                apply = partial(self._apply_step, operation)
                fault_executor.submit(operation.action.target, apply)
            changes = self._link_trace.pop_due(self._now())
            if changes:
                trace_executor.submit("trace", partial(self._apply_step, changes))
            if self._now() >= limit:
                text = f"not finished after {limit:g} s{self._describe_missing()}"
                return "timed out", text

    def _next_deadline(self, limit: float) -> float:
        """Return the instant of the next fault or trace change, at most the time limit."""
        deadline = limit
        for scheduled in (
            self._script.next_deadline(),
            self._link_trace.next_deadline(),
        ):
            if scheduled is not None:
                deadline = min(deadline, scheduled)
        return deadline

    def _react_to_container(self, container: DeviceContainer) -> None:
        """Look up why a container ended, or admit a started device."""
        _LOG.info("the container of %s is %s", container.name, container.state)
        # Both functions wait for the engine or for a device. They run in the pool, because the loop must continue to
        # process events and faults.
        if container.state in ("exited", "dead", "gone", "lost"):
            self._pool.submit(self._look_up_ending, container.name)
        elif self._needs_admission(container):
            self._pool.submit(self._admit_or_log, container.name)

    def _needs_admission(self, container: DeviceContainer) -> bool:
        is_device = container.name != SHAPER
        is_running = container.state == "running"
        return is_device and is_running and not self._is_reporting(container)

    def _look_up_ending(self, name: str) -> None:
        try:
            ending = self._lab.ending(name)
        except Exception as error:  # noqa: BLE001 - the engine may stop too; the end of the container is certain
            ending = Ending(f"ended; the container engine gives no reason: {error}")
        if ending is not None:  # otherwise the container was restarted in the meantime
            self._news.put(partial(self._handle_container_end, name, ending))

    def _admit_or_log(self, name: str) -> None:
        """Admit a device started by another terminal or the engine; log an error."""
        try:
            self._admit(name)
        except Exception as error:  # noqa: BLE001 - the device may have ended, or the engine may be stopping
            _LOG.info("%s cannot join", name, exc_info=True)
            self._log_message(f"{name} started but cannot join: {error}")

    def _handle_container_end(self, name: str, ending: Ending) -> End | None:
        """Record the end of a container, or return the end of the run."""
        if name == SHAPER:
            text = f"the shaper, which emulates the links, {ending.text}{self._engine_absence}"
            return "failed", text
        if ending.out_of_memory:
            return "failed", f"{name} {ending.text}"
        if name == self._coordinator and self._lab.devices[name].state == "lost":
            return "failed", f"{name}, which coordinates the run, {ending.text}"
        # An end that a fault or a command requested already has an event.
        if not ending.requested:
            fields = {"text": f"{name} {ending.text}"}
            self._log(Event(max(0.0, self._now()), TESTBED, "log", fields))
        return None

    def _describe_missing(self) -> str:
        """Name the devices that are not up, as a suffix of a message."""
        missing: list[str] = []
        with suppress(HostError):
            for name, state in self._fault_target.states().items():
                if state != "up":
                    missing.append(name)
        if self._coordinator in missing:
            return f"; {without_coordinator(self._coordinator)}"
        return f"; down: {', '.join(missing)}" if missing else ""

    def _end_from_event(self, event: Event) -> End | None:
        if event.event != "state":
            return None
        state = event.fields["state"]
        values = ", ".join(map(str, event.fields.values()))
        _LOG.info("%s at %.3f s: %s", event.device, event.time, values)
        if state == "failed":
            error = event.fields.get("error", "its program failed")
            return "failed", f"{event.device}: {error}"
        if state == "finished" and event.device == self._coordinator:
            return "finished", None
        return None

    def _log(self, event: Event) -> None:
        self._events.append(event)
        self._on_event(event)

    def _apply_step(self, step: RecordedStep) -> None:
        """Apply a fault or trace changes, and queue the result for the loop."""
        start = self._now()
        changed = StateDiff()
        error = None
        try:
            changed = apply_step(step, self._fault_target)
        except Exception as failure:  # noqa: BLE001 - passed to the loop, which decides about the run
            _LOG.info("%s failed", step, exc_info=True)
            error = failure
        self._news.put(
            partial(self._record_result, step, start, self._now(), changed, error)
        )

    def _record_result(
        self,
        step: RecordedStep,
        began: float,
        actual: float,
        changed: StateDiff,
        error: Exception | None = None,
    ) -> End | None:
        """Record the result of a fault or a trace change; an error ends the run, whose results would be meaningless.

        ``began`` and ``actual`` are the instants of the run, in seconds, before and after the application.
        """
        if error is not None:
            return "failed", f"{step} failed: {error}"
        began_field: dict[str, Any] = {}
        if isinstance(step, FaultOperation):
            _LOG.info("%s, applied from %.3f to %.3f s", step, began, actual)
            self._script.complete(step, actual)
            if step.action.waits:
                began_field = {"began": began}
        for event, fields in step_events(step, changed, self._speeds):
            if event == "fault":
                fields = fields | began_field
            self._log(Event(actual, TESTBED, event, fields))
        # Only for faults of the scenario: after a manual kill, which `_answer_command` records, the user may restart
        # the coordinator.
        is_down = changed.devices.get(self._coordinator) == "down"
        if is_down and not self._script.has_pending_start(self._coordinator):
            return "failed", without_coordinator(self._coordinator)
        return None

    def _record_initial_state(self) -> None:
        """Record the faults and changes already active in an existing lab, as if applied at the start.

        Active faults of an earlier run's scenario are reverted, because the new run's scenario has other faults.
        """
        for handle, action in self._fault_target.current.in_force.items():
            if handle.startswith(SCRIPTED):
                apply_step(FaultOperation(action, handle, "undo"), self._fault_target)
        state = self._fault_target.current
        for handle, action in state.in_force.items():
            for event, fields in FaultOperation(action, handle).events():
                self._log(Event(0.0, TESTBED, event, fields))
        changed = state.diff_since(self._fault_target.scenario_state)
        for event, fields in change_events(changed, self._speeds):
            self._log(Event(0.0, TESTBED, event, fields))

    # The end

    def _collect_weights(
        self, status: Status
    ) -> tuple[bytes | None, dict[str, bytes], list[str]]:
        """Return the final weights, the parts of all devices after a failed run, and a list of lost results."""
        if not self._prepared.problem.workload.is_computed:
            return None, {}, []
        if status == "finished":
            weights, lost_results = self._fetch_final_weights(WORK_SECONDS)
            return weights, {}, lost_results
        if status in UNGATHERED:
            weights, _ = self._fetch_final_weights(UNGATHERED_SECONDS)
            return weights, self._gather_parts(), []
        return None, {}, []

    def _fetch_final_weights(self, seconds: float) -> tuple[bytes | None, list[str]]:
        """Return the weights exposed by the coordinator, if any, and a list of lost results."""
        try:
            exposed = self._lab.agent(self._coordinator).weights(seconds)
            return self._inputs.complete(exposed), []
        except AgentGone:
            return None, [
                f"the weights: {self._coordinator} went down as its program ended"
            ]
        except TestbedError:  # a coordinator need not expose weights
            return None, []

    def _gather_parts(self) -> dict[str, bytes]:
        """Return the exposed part of the model from each responding device."""

        def ask(name: str) -> bytes | None:
            with suppress(TestbedError):  # the device is down, or exposes no weights
                return self._lab.agent(name).weights(UNGATHERED_SECONDS, part=True)
            return None

        parts = {}
        with ThreadPoolExecutor(WORKERS, "weights") as pool:
            answers = pool.map(ask, self._lab.devices)
            for name, weights in zip(self._lab.devices, answers, strict=True):
                if weights is not None:
                    parts[name] = weights
        return parts

    def _stop_all(self) -> None:
        """Stop all running programs and collect their last events."""

        def stop(name: str) -> None:
            with suppress(TestbedError):  # the device is killed or paused
                self._lab.agent(name).stop()

        with ThreadPoolExecutor(len(self._lab.devices), "stop") as pool:
            list(pool.map(stop, self._lab.devices))
        deadline = time.monotonic() + GATHER_SECONDS
        for _, listener in list(self._listeners.values()):
            listener.join(max(0.0, deadline - time.monotonic()))
        with suppress(queue.Empty):
            while True:
                news = self._news.get_nowait()
                if isinstance(news, Event):
                    self._log(news)
