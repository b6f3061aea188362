"""A run that goes on: what is desired of it, what is observed, and the loop that acts on the difference.

Desired is what the scenario, its faults and traces, and commands by hand make of links, speeds and devices:
`DockerFaultTarget` brings that about and holds what is in force. Observed is what the engine says of each container
(`lab.changes`) and what the agents report. The loop compares: a device that runs, and whose program is not known to
report, is given its links and its program, whoever switched it on; a device that has ended is a state, for the method
to deal with; without the shaper, or without a lead that may come back, there is no run.
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
from testbed.faults.script import SCRIPTED, FaultOperation, FaultScript, TraceScript
from testbed.network.checks import SHAPER
from testbed.prepare import Prepared
from testbed.trace.events import TESTBED, Event
from testbed.trace.log import EventLog
from testbed.trace.outcome import UNGATHERED, Outcome, Status, ended, without_lead
from testbed_controller.hosts.lab import AnyLab
from testbed_controller.lab.clients import WORK_SECONDS, AgentGone
from testbed_controller.lab.containers import DeviceContainer
from testbed_controller.lab.health import Ending
from testbed_controller.running import control
from testbed_controller.running.machines import DockerFaultTarget, changes_of, events_of

_LOG = logging.getLogger(__name__)

START_SECONDS, START_SECONDS_EACH = 0.2, 0.01
"""Between the first request to start and the common origin, and for each device: by then every agent has heard of it,
also on a host that others keep busy."""
GATHER_SECONDS = 2.0
"""How long the last events of the devices are waited for after the lead's program has ended."""
DEATH_SECONDS = 3.0
"""How long after a device has fallen silent before the start the engine is asked how it ended."""
UNGATHERED_SECONDS = 60.0
"""How long a device may take to return its weights after a run that failed."""
WORKERS = 16
"""Faults, boots and the like that may be under way at once: a restart takes a while and must not make others late."""
T = TypeVar("T")


def _distinct(computing: Iterable[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Return each kind of processor and kernels once."""
    kinds: list[dict[str, Any]] = []
    for each in computing:
        if each is not None and each not in kinds:
            kinds.append(each)
    return kinds


End = tuple[Status, str | None]


class KeyedExecutor:
    """Runs the jobs of one key in the order of their submission; those of different keys side by side.

    A job that waits for its turn takes a worker of the pool; what it waits for has begun before it.
    """

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._last: dict[Hashable, Future[None]] = {}

    def submit(self, key: Hashable, job: Callable[[], None]) -> None:
        """Run a job as soon as all earlier ones of its key are over."""
        before = self._last.get(key)

        def in_turn() -> None:
            if before is not None:
                wait([before])
            job()

        self._last[key] = self._pool.submit(in_turn)


class Execution:
    """One run of a method's programs on a lab that is up."""

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
        self._lead = prepared.plan.lead
        addresses = {name: found.address for name, found in lab.devices.items()}
        self._deployments = deployments(prepared, lab.run_id, lab.token, addresses, lab.broadcast)
        self._inputs = prepared.workload.inputs(prepared, data, weights)
        self._on_event = on_event
        self._news: queue.SimpleQueue[Event | Callable[[], End | None]] = queue.SimpleQueue()
        """What the loop is to take in: events, and what it is to do about anything else that happened."""
        self._events = EventLog()
        self._script = FaultScript(prepared.scenario.faults)
        self._trace = TraceScript(prepared.experiment.changes)
        self._containers = DockerFaultTarget(lab, self._admit)
        self._speeds = {device.name: device.speed for device in prepared.experiment.devices}
        self._origin = 0.0
        """On the monotonic clock of this machine; `Agent` gives it to each device by the clock of its host."""
        self._reports: dict[str, tuple[int, threading.Thread]] = {}
        """Observed: the process of each device whose program reports its events, and the thread that takes them in."""
        self._computing: dict[str, dict[str, Any] | None] = {}
        """Processor and kernels of each device."""
        self._pool = ThreadPoolExecutor(max(WORKERS, len(lab.devices)), "run")
        self._admission = {name: threading.Lock() for name in lab.devices}
        self._over = threading.Event()
        self._away = ""
        """How long the engine was away, if it was."""

    def run(self, on_stage: Callable[[str], None]) -> Outcome:
        """Deploy, start, break, and follow until the lead is done."""
        # Traces one at a time: the later of two figures of one link is the one that stays.
        with self._pool as pool, ThreadPoolExecutor(1, "trace") as replayer:
            done = pool.map(lambda name: self._if_there(name, lambda: self._deploy(name)), self._lab.devices)
            there = {name: after for name, after in zip(self._lab.devices, done, strict=True) if after is not None}
            on_stage("running")
            self._lab.shaper.host_load(reset=True)
            controller = time.process_time()
            self._recall()
            # The first figures of a trace are those that the run begins with.
            first = self._trace.due(0.0)
            self._settle(first, 0.0, 0.0, apply_step(first, self._containers))
            self._origin = time.monotonic() + START_SECONDS + START_SECONDS_EACH * len(there)
            list(pool.map(lambda each: self._if_there(each[0], lambda: self._start(*each)), there.items()))
            changes = self._lab.changes(self._note_return)
            threading.Thread(target=self._observe, args=(changes,), name="changes", daemon=True).start()
            try:
                with control.serving(self._lab.run_id, self._by_hand):
                    status, error = self._follow(KeyedExecutor(pool), KeyedExecutor(replayer))
            except KeyboardInterrupt:
                status, error = "interrupted", "stopped by the user"
            finally:
                self._over.set()
                changes.close()
        status, error = ended(status, error, self._events, weights_given=self._inputs.begins_with_weights)
        fidelity: dict[str, Any] = {"controller_seconds": time.process_time() - controller}
        with suppress(HostError):  # the shaper may have ended, and the run with it
            fidelity |= self._lab.shaper.host_load()
        computed = self._prepared.problem.workload.is_computed
        weights, lost, parts = None, list[str](), dict[str, bytes]()
        if computed and status == "finished":
            weights, lost = self._final_weights(WORK_SECONDS)
        elif computed and status in UNGATHERED:
            weights, _ = self._final_weights(UNGATHERED_SECONDS)
            parts = self._parts()
        self._stop_all()
        return Outcome(
            runtime="emulate",
            status=status,
            error=error,
            events=self._events.ordered(),
            weights_file=weights,
            parts=parts,
            host={"computing": _distinct(self._computing.values())},
            fidelity={**fidelity, "lost": lost} if lost else fidelity,
        )

    # Programs

    def _if_there(self, name: str, act: Callable[[], T]) -> T | None:
        """Return what an act on a device returns, or None where it is down, which is the method's to deal with.

        Only without the lead there is no run at all.
        """
        try:
            return act()
        except AgentGone as error:
            _LOG.info("%s does not answer before the start: %s", name, error)
            ending = self._lab.ending(name, DEATH_SECONDS)
            if ending is not None and ending.starved:
                raise TestbedError(f"{name} {ending.text}") from error
            if name == self._lead:
                raise TestbedError(f"{name} leads the run and went down before its start: {error}") from error
            self._say(f"{name} is down as the run starts")
            return None

    def _deploy(self, name: str) -> int:
        """Hand out the work; return how many events the device has recorded before, in earlier runs on the lab."""
        agent = self._lab.agent(name)
        answer = agent.deploy(self._deployments.of(name))
        after = int(answer["events"])
        self._computing[name] = answer.get("computing")
        self._containers.inform(name)
        if (data := self._inputs.data(name)) is not None:
            agent.put_data(data)
        if (weights := self._inputs.weights(name)) is not None:
            agent.put_shard(weights)
        _LOG.info("deployed %s", name)
        return after

    def _start(self, name: str, after: int) -> None:
        pid = self._lab.devices[name].pid
        self._lab.agent(name).start(self._origin)
        _LOG.info("started the program of %s", name)
        listener = threading.Thread(target=self._listen, args=(name, pid, after), name=f"events-{name}", daemon=True)
        self._reports[name] = pid, listener
        listener.start()

    def _admit(self, name: str) -> None:
        """Shape the links of a device that has been switched on, and start its program; nothing where it is there."""
        with self._admission[name]:
            device = self._lab.devices[name]
            if device.state == "running" and not self._is_reporting(device):
                self._lab.admit(name, self._containers.links())
                self._start(name, self._deploy(name))

    def _is_reporting(self, device: DeviceContainer) -> bool:
        return device.name in self._reports and self._reports[device.name][0] == device.pid

    def _listen(self, name: str, pid: int, seen: int) -> None:
        """Pass on what a device records after ``seen`` events, until its program ends or it has started again."""
        problem = ""
        while not self._over.is_set() and self._lab.devices[name].pid in (0, pid):
            try:
                for event in self._lab.agent(name).events(seen):
                    seen += 1
                    self._news.put(event)
                return
            except TestbedError as error:  # killed, paused or gone: a state of the device, not an error of the run
                if str(error) != problem:
                    problem = str(error)
                    _LOG.info("the events of %s are interrupted after %d: %s", name, seen, problem)
            self._over.wait(0.1)

    def _observe(self, containers: Iterable[DeviceContainer]) -> None:
        """Pass on what the engine says of the containers."""
        try:
            for found in containers:
                self._news.put(partial(self._compare, found))
        except Exception as error:  # noqa: BLE001 - without the engine's word nothing more is known of the run
            _LOG.info("the containers can no longer be followed", exc_info=True)
            lost: End = "failed", str(error)
            self._news.put(lambda: lost)

    def _note_return(self, seconds: float) -> None:
        """Record that the engine gave no events for so long."""
        _LOG.info("the engine gave no events for %.1f s", seconds)
        self._away = f" while the container engine was away for {seconds:.1f} s"
        self._say(self._away.removeprefix(" while "))

    def _by_hand(self, request: control.Request) -> control.Answer:
        """Carry out a command by hand, and have it among the events."""

        def record(step: RecordedStep, changed: StateDiff) -> None:
            now = max(0.0, self._now())
            for event, fields in events_of(step, changed, self._speeds):
                self._news.put(Event(now, TESTBED, event, fields))

        return control.answer(request, self._containers, record)

    # The loop

    def _now(self) -> float:
        return time.monotonic() - self._origin

    def _say(self, text: str) -> None:
        self._news.put(Event(max(0.0, self._now()) if self._origin else 0.0, TESTBED, "log", {"text": text}))

    def _follow(self, strikers: KeyedExecutor, replayer: KeyedExecutor) -> End:
        """Take what happens and deadlines as they come; return how the run ended."""
        limit = self._prepared.scenario.time_limit
        while True:
            deadlines = (self._script.next_deadline(), self._trace.next_deadline())
            deadline = min([limit, *(each for each in deadlines if each is not None)])
            operations: list[FaultOperation] = []
            with suppress(queue.Empty):
                news = self._news.get(timeout=max(0.0, deadline - self._now()))
                if isinstance(news, Event):
                    operations = self._script.observe(news.time, news.device, news.event, news.fields)
                    self._log(news)
                if end := self._end(news) if isinstance(news, Event) else news():
                    return end
            for operation in operations + self._script.due(self._now()):
                strikers.submit(operation.action.target, partial(self._carry_out, operation))
            if changes := self._trace.due(self._now()):
                replayer.submit("trace", partial(self._carry_out, changes))
            if self._now() >= limit:
                return "timed out", f"not over after {limit:g} s{self._missing()}"

    def _compare(self, found: DeviceContainer) -> None:
        """Act where what a container does is not what the run needs of it."""
        _LOG.info("the container of %s is %s", found.name, found.state)
        if found.state in ("exited", "dead", "gone", "lost"):
            self._pool.submit(self._explain, found.name)
        elif found.state == "running" and found.name != SHAPER and not self._is_reporting(found):
            self._pool.submit(self._take_in, found.name)

    def _explain(self, name: str) -> None:
        try:
            ending = self._lab.ending(name)
        except Exception as error:  # noqa: BLE001 - the engine may be ending as well: that something ended is known all the same
            ending = Ending(f"ended; the container engine does not say how: {error}")
        if ending is not None:  # else it has been started again meanwhile
            self._news.put(partial(self._note_end, name, ending))

    def _take_in(self, name: str) -> None:
        """Let a device join that somebody else switched on, from another terminal or the engine itself."""
        try:
            self._admit(name)
        except Exception as error:  # noqa: BLE001 - a device that was ended meanwhile, or an engine that is ending
            _LOG.info("%s cannot join", name, exc_info=True)
            self._say(f"{name} started but cannot join: {error}")

    def _note_end(self, name: str, ending: Ending) -> End | None:
        """Say how a container ended, unless that was asked for; without the shaper there is no run."""
        if name == SHAPER:
            return "failed", f"the shaper, which holds the links, {ending.text}{self._away}"
        if ending.starved:
            return "failed", f"{name} {ending.text}"
        if name == self._lead and self._lab.devices[name].state == "lost":
            return "failed", f"{name}, which leads the run, {ending.text}"
        if not ending.asked:
            self._log(Event(max(0.0, self._now()), TESTBED, "log", {"text": f"{name} {ending.text}"}))
        return None

    def _missing(self) -> str:
        """Say which devices are down."""
        down: list[str] = []
        with suppress(HostError):
            down = [name for name, state in self._containers.states().items() if state != "up"]
        if self._lead in down:
            return f"; {without_lead(self._lead)}"
        return f"; down: {', '.join(down)}" if down else ""

    def _end(self, event: Event) -> End | None:
        if event.event != "state":
            return None
        _LOG.info("%s at %.3f s: %s", event.device, event.time, ", ".join(map(str, event.fields.values())))
        if event.fields["state"] == "failed":
            return "failed", f"{event.device}: {event.fields.get('error', 'its program failed')}"
        if event.fields["state"] == "finished" and event.device == self._lead:
            return "finished", None
        return None

    def _log(self, event: Event) -> None:
        self._events.append(event)
        self._on_event(event)

    def _carry_out(self, step: RecordedStep) -> None:
        """Bring a fault or changes of the trace about, and let the loop judge what came of it."""
        began, changed, error = self._now(), StateDiff(), None
        try:
            changed = apply_step(step, self._containers)
        except Exception as failure:  # noqa: BLE001 - handed to the thread that decides about the run
            _LOG.info("%s failed", step, exc_info=True)
            error = failure
        self._news.put(partial(self._settle, step, began, self._now(), changed, error))

    def _settle(
        self, step: RecordedStep, began: float, actual: float, changed: StateDiff, error: Exception | None = None
    ) -> End | None:
        """Note what a fault or the trace did; without what the scenario asks for, the rest would mean nothing."""
        if error is not None:
            return "failed", f"{step} failed: {error}"
        own: dict[str, Any] = {}
        if isinstance(step, FaultOperation):
            _LOG.info("%s, applied from %.3f to %.3f s", step, began, actual)
            self._script.done(step, actual)
            own = {"began": began} if step.action.waits else {}
        for event, fields in events_of(step, changed, self._speeds):
            self._log(Event(actual, TESTBED, event, fields | (own if event == "fault" else {})))
        # Who killed it by hand may start it by hand; what a fault of the scenario ended stays down.
        if changed.devices.get(self._lead) == "down" and not self._script.may_start(self._lead):
            return "failed", without_lead(self._lead)
        return None

    def _recall(self) -> None:
        """Record what is in force already on a lab that stood before, as if it struck at the start.

        What faults of an earlier run's scenario left in force is taken back: this one has its own.
        """
        for handle, action in self._containers.shown.in_force.items():
            if handle.startswith(SCRIPTED):
                apply_step(FaultOperation(action, handle, "undo"), self._containers)
        shown = self._containers.shown
        for handle, action in shown.in_force.items():
            for event, fields in FaultOperation(action, handle).events():
                self._log(Event(0.0, TESTBED, event, fields))
        for event, fields in changes_of(shown.changed(self._containers.untouched), self._speeds):
            self._log(Event(0.0, TESTBED, event, fields))

    # The end

    def _final_weights(self, seconds: float) -> tuple[bytes | None, list[str]]:
        """Return the weights that the lead exposes, if it does, and what is lost."""
        try:
            left = self._lab.agent(self._lead).weights(seconds)
            return self._inputs.complete(left), []
        except AgentGone:
            return None, [f"the weights, since {self._lead} went down as its program ended"]
        except TestbedError:  # the lead need not expose any
            return None, []

    def _parts(self) -> dict[str, bytes]:
        """Return its part of the model from each device that still answers and exposes one."""

        def ask(name: str) -> bytes | None:
            with suppress(TestbedError):  # killed, or it exposes none
                return self._lab.agent(name).weights(UNGATHERED_SECONDS, part=True)
            return None

        with ThreadPoolExecutor(WORKERS, "weights") as pool:
            found = dict(zip(self._lab.devices, pool.map(ask, self._lab.devices), strict=True))
        return {name: weights for name, weights in found.items() if weights is not None}

    def _stop_all(self) -> None:
        """End the programs that still run and take in what they recorded to the last."""

        def stop(name: str) -> None:
            with suppress(TestbedError):  # killed or paused: nothing to stop
                self._lab.agent(name).stop()

        with ThreadPoolExecutor(len(self._lab.devices), "stop") as pool:
            list(pool.map(stop, self._lab.devices))
        deadline = time.monotonic() + GATHER_SECONDS
        for _, listener in list(self._reports.values()):
            listener.join(max(0.0, deadline - time.monotonic()))
        with suppress(queue.Empty):
            while True:
                news = self._news.get_nowait()
                if isinstance(news, Event):
                    self._log(news)
