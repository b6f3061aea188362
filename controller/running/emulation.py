"""Runs one experiment in containers on the real clock."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from controller.lab import capability
from controller.lab.agents import AgentGone
from controller.lab.lab import Lab, LinkBackend
from controller.lab.reaper import guard
from controller.running import verification
from controller.running.byhand import Journal
from controller.running.faults import Containers, events_of
from controller.running.fidelity import HostMonitor, since
from controller.running.turns import Turns
from testbed.common.errors import TestbedError
from testbed.faults.conditions import Changed
from testbed.faults.machines import RecordedStep, carry_out
from testbed.faults.replay import Changes, TraceScript
from testbed.faults.script import FaultOperation, FaultScript
from testbed.prepare import Prepared
from testbed.trace.events import TESTBED, Event
from testbed.trace.log import EventLog
from testbed.trace.outcome import Outcome, Status, ended, without_lead

if TYPE_CHECKING:
    import torch

    from testbed.data.dataset import Dataset

START_MARGIN = 0.3
"""Seconds between the request to start and the common origin: every agent has heard of it by then."""
GATHER_SECONDS = 2.0
"""How long the last events of the devices are waited for after the lead's program has ended."""
JOURNAL_INTERVAL = 0.1
"""Seconds between two looks at what commands from outside did."""
DEATH_SECONDS = 3.0
"""How long after a device has fallen silent the engine is asked whether it ran out of memory."""
SIMULTANEOUS_FAULTS = 16
"""Faults that may be under way at once: a restart takes a while and must not make the next strike late."""


@dataclass(frozen=True)
class _Done:
    """A step of the faults or the trace that has been carried out, or could not be."""

    step: RecordedStep
    began: float
    actual: float
    changed: Changed
    error: Exception | None = None

    @property
    def problem(self) -> str:
        """Say what could not be done, and why."""
        return f"{self.step} failed: {self.error}"


@dataclass(frozen=True)
class _Starved:
    """A device that the kernel has ended since it needed more memory than it has."""

    problem: str


def emulate(
    prepared: Prepared,
    dataset: Dataset,
    on_event: Callable[[Event], None] = lambda _event: None,
    weights: Mapping[str, torch.Tensor] | None = None,
    *,
    on_stage: Callable[[str], None] = lambda _text: None,
    links: LinkBackend = "auto",
    accept_links: bool = False,
    keep: bool = False,
    results: Path | None = None,
    standing: Lab | None = None,
) -> Outcome:
    """Create the lab, verify its links, run the method on it with its faults, and remove it.

    The first four arguments are those of `testbed.simulation.simulate`. ``links`` says what shapes the links. With
    ``keep`` the lab stays up afterwards. ``standing`` is a lab that is up, and stays so. Raises
    HostError where the lab cannot be had; `LinksError` (of `verification`) when a link is outside its tolerance and not
    accepted so; InputError where a link asks for more than this host was measured to carry.
    """
    began = time.monotonic()
    if not accept_links and standing is None:
        capability.check(prepared.experiment, links)
    made = _lab(prepared, links, on_stage, keep=keep, results=results) if standing is None else nullcontext(standing)
    with made as lab:
        if standing is not None and results is not None:
            lab.note_results(results)
        on_stage("measuring the links")
        measured = verification.verified(lab.shaper.probe, list(prepared.experiment.links), accept_links)
        on_stage("handing out the work")
        execution = _Execution(lab, prepared, dataset, weights, on_event)
        before = lab.shaper.statistics(reset=True)
        outcome = execution.run(on_stage)
        outcome.links = measured
        outcome.host = lab.facts()
        outcome.fidelity |= since(before, lab.shaper.statistics())
        if keep or standing is not None:
            on_stage(f"the lab stays up: testbed down {lab.run_id}")
    outcome.wall_seconds = time.monotonic() - began
    return outcome


@contextmanager
def _lab(
    prepared: Prepared, links: LinkBackend, on_stage: Callable[[str], None], *, keep: bool, results: Path | None
) -> Iterator[Lab]:
    """Have a lab for the time of the run, guarded against the death of this process."""
    run_id = Lab.new_run_id(prepared.scenario.name)
    with guard(run_id, keep=keep):
        lab = Lab.create(prepared.trial, run_id, links=links, progress=on_stage, results=results)
        try:
            yield lab
        finally:
            if not keep:
                on_stage("removing the containers")
                lab.down()


class _Execution:
    """One run of a method's programs on a lab that is up, with the threads that follow and break it."""

    def __init__(
        self,
        lab: Lab,
        prepared: Prepared,
        dataset: Dataset,
        weights: Mapping[str, torch.Tensor] | None,
        on_event: Callable[[Event], None],
    ) -> None:
        self._lab = lab
        self._prepared = prepared
        self._lead = prepared.plan.lead
        addresses = {name: found.address for name, found in lab.devices.items()}
        self._deployments = prepared.deployments(lab.run_id, addresses, lab.broadcast)
        self._dataset = dataset
        self._weights = weights
        self._on_event = on_event
        self._inbox: queue.SimpleQueue[Event | _Done | _Starved] = queue.SimpleQueue()
        self._events = EventLog()
        self._script = FaultScript(prepared.scenario.faults)
        self._trace = TraceScript(prepared.experiment.changes)
        self._containers = Containers(lab, self._boot)
        self._journal = Journal(lab.run_id)
        self._speeds = {device.name: device.speed for device in prepared.experiment.devices}
        self._origin = 0.0
        """On the monotonic clock, which all containers of one engine share with its host."""
        self._followers: dict[str, threading.Thread] = {}
        self._restarting: set[str] = set()
        """Devices that a fault of the script is starting again right now."""
        self._absent: set[str] = set()
        """Devices that went down before the start."""
        self._over = threading.Event()

    def run(self, on_stage: Callable[[str], None]) -> Outcome:
        """Deploy, start, break, and follow until the lead is done."""
        with ThreadPoolExecutor(len(self._lab.devices), "deploy") as pool:
            list(pool.map(self._if_there(self._deploy), self._lab.devices))
            on_stage("running")
            monitor = HostMonitor()
            monitor.start()
            # The first figures of a trace are those that the run begins with.
            first = self._carry_out(Changes(self._trace.due(0.0)), lambda: 0.0)
            self._origin = time.monotonic() + START_MARGIN
            list(pool.map(self._if_there(self._start), self._lab.devices))
        if first.error is not None:
            raise first.error
        self._settle(first)
        with (
            ThreadPoolExecutor(SIMULTANEOUS_FAULTS, "fault") as strikers,
            # One at a time: the later of two figures of one link is the one that stays.
            ThreadPoolExecutor(1, "trace") as replayer,
            self._lab.watch_starts() as starts,
        ):
            # A device that was started again before we listened was not heard.
            self._lab.refresh()
            back = [name for name in sorted(self._absent) if self._lab.devices[name].state == "running"]
            threading.Thread(target=self._adopt, args=(chain(back, starts),), name="starts", daemon=True).start()
            threading.Thread(target=self._read_journal, name="journal", daemon=True).start()
            try:
                status, error = self._follow(Turns(strikers), Turns(replayer))
            except KeyboardInterrupt:
                status, error = "interrupted", "stopped by the user"
            self._over.set()
        status, error = ended(status, error, self._events, weights_given=self._weights is not None)
        fidelity = monitor.stop()
        computed = self._prepared.problem.workload.numerics == "full"
        weights = self._final_weights() if computed and status == "finished" else None
        self._stop_all()
        return Outcome(
            runtime="emulate",
            status=status,
            error=error,
            events=self._events.ordered(),
            weights_file=weights,
            fidelity=fidelity,
        )

    # Programs

    def _if_there(self, act: Callable[[str], None]) -> Callable[[str], None]:
        """Do something with a device unless it is down, which is a state of the device and the method's to deal with.

        Only without the lead there is no run at all.
        """

        def attempt(name: str) -> None:
            if name in self._absent:
                return
            try:
                act(name)
            except AgentGone as error:
                if why := self._lab.health.starved(name, DEATH_SECONDS):
                    raise TestbedError(why) from error
                if name == self._lead:
                    raise TestbedError(f"{name} leads the run and went down before its start: {error}") from error
                self._absent.add(name)
                self._inbox.put(Event(0.0, TESTBED, "log", {"text": f"{name} is down as the run starts"}))

        return attempt

    def _deploy(self, name: str) -> None:
        agent = self._lab.agent(name)
        agent.deploy(self._deployments.of(name))
        self._containers.inform(name)
        own = self._prepared.share(self._dataset, name)
        if own is not None:
            agent.put_data(own)
        if name == self._lead and self._weights is not None:
            agent.put_shard(self._weights)

    def _start(self, name: str) -> None:
        self._lab.agent(name).start(self._origin)
        follower = threading.Thread(target=self._listen, args=(name,), name=f"events-{name}", daemon=True)
        self._followers[name] = follower
        follower.start()

    def _boot(self, name: str) -> None:
        """Start a device that is down, and its program."""
        self._restarting.add(name)
        self._start_again(name)

    def _start_again(self, name: str) -> None:
        self._lab.start(name, self._containers.links())
        self._deploy(name)
        self._start(name)

    def _listen(self, name: str) -> None:
        """Pass on what a device records, until its program or its container ends."""
        agent = self._lab.agent(name)
        seen = 0
        silent = False
        while not self._over.is_set():
            with suppress(TestbedError):  # killed, paused or gone: a state of the device, not an error of the run
                for event in agent.events(seen):
                    seen += 1
                    silent = False
                    self._inbox.put(event)
                return
            if self._followers.get(name) is not threading.current_thread():
                return  # it has been booted again, and somebody else listens to that
            if not silent and (why := self._lab.health.starved(name, DEATH_SECONDS)):
                self._inbox.put(_Starved(why))
                return
            silent = True
            if self._over.wait(0.1):
                return

    def _read_journal(self) -> None:
        """Take in what commands from outside do, until the run is over."""
        over = False
        while not over:
            over = self._over.wait(JOURNAL_INTERVAL)
            for event in self._journal.news(self._origin):
                self._inbox.put(event)

    def _adopt(self, starts: Iterator[str]) -> None:
        """Boot devices that somebody else started: `testbed fault restart` from another terminal, or the engine."""
        for name in starts:
            if self._over.is_set():
                return
            if name in self._restarting:
                self._restarting.discard(name)
                continue
            try:
                self._start_again(name)
            except TestbedError as error:
                self._inbox.put(
                    Event(self._now(), TESTBED, "log", {"text": f"{name} started but cannot join: {error}"})
                )

    # Events and faults

    def _now(self) -> float:
        return time.monotonic() - self._origin

    def _follow(self, strikers: Turns, replayer: Turns) -> tuple[Status, str | None]:
        """Take events and deadlines as they come; return how the run ended."""
        limit = self._prepared.scenario.time_limit
        while True:
            deadlines = (self._script.next_deadline(), self._trace.next_deadline())
            deadline = min([limit, *(each for each in deadlines if each is not None)])
            with suppress(queue.Empty):
                news = self._inbox.get(timeout=max(0.0, deadline - self._now()))
                if isinstance(news, _Starved):
                    return "failed", news.problem
                if isinstance(news, _Done):
                    # Without what the scenario asks for, the rest of the run would mean nothing.
                    if news.error is not None:
                        return "failed", news.problem
                    self._settle(news)
                    # Who killed it by hand may start it by hand; what a fault of the scenario ended stays down.
                    if news.changed.devices.get(self._lead) == "down" and not self._script.may_start(self._lead):
                        return "failed", without_lead(self._lead)
                else:
                    self._operate(strikers, self._script.observe(news.time, news.device, news.event, news.fields))
                    self._log(news)
                    if end := self._end(news):
                        return end
            self._operate(strikers, self._script.due(self._now()))
            if changes := self._trace.due(self._now()):
                self._submit(replayer, Changes(changes))
            if self._now() >= limit:
                return "timed out", f"not over after {limit:g} s{self._missing()}"

    def _missing(self) -> str:
        """Say which devices are down."""
        self._lab.refresh()
        down = [name for name, device in self._lab.devices.items() if device.state != "running"]
        if self._lead in down:
            return f"; {without_lead(self._lead)}"
        return f"; down: {', '.join(down)}" if down else ""

    def _end(self, event: Event) -> tuple[Status, str | None] | None:
        if event.event != "state":
            return None
        if event.fields["state"] == "failed":
            return "failed", f"{event.device}: {event.fields.get('error', 'its program failed')}"
        if event.fields["state"] == "finished" and event.device == self._lead:
            return "finished", None
        return None

    def _log(self, event: Event) -> None:
        self._events.append(event)
        self._on_event(event)

    def _operate(self, strikers: Turns, operations: list[FaultOperation]) -> None:
        for operation in operations:
            self._submit(strikers, operation)

    def _submit(self, turns: Turns, step: RecordedStep) -> None:
        about = step.action.target if isinstance(step, FaultOperation) else "trace"
        turns.submit(about, lambda: self._inbox.put(self._carry_out(step, self._now)))

    def _carry_out(self, step: RecordedStep, clock: Callable[[], float]) -> _Done:
        changed, began = Changed(), clock()
        error = None
        try:
            changed = carry_out(step, self._containers)
        except Exception as failure:  # noqa: BLE001 - handed to the thread that decides about the run
            error = failure
        return _Done(step, began, clock(), changed, error)

    def _settle(self, done: _Done) -> None:
        """Note what a fault or the trace did."""
        if isinstance(done.step, FaultOperation):
            self._script.done(done.step, done.actual)
        slow = isinstance(done.step, FaultOperation) and done.step.action.waits
        for event, fields in events_of(done.step, done.changed, self._speeds):
            own = {"began": done.began} if slow and event == "fault" else {}
            self._log(Event(done.actual, TESTBED, event, fields | own))

    # The end

    def _final_weights(self) -> bytes | None:
        try:
            return self._lab.agent(self._lead).weights()
        except TestbedError:  # the lead need not expose any
            return None

    def _stop_all(self) -> None:
        """End the programs that still run and take in what they recorded to the last."""

        def stop(name: str) -> None:
            with suppress(TestbedError):  # killed or paused: nothing to stop
                self._lab.agent(name).stop()

        with ThreadPoolExecutor(len(self._lab.devices), "stop") as pool:
            list(pool.map(stop, self._lab.devices))
        deadline = time.monotonic() + GATHER_SECONDS
        for follower in list(self._followers.values()):
            follower.join(max(0.0, deadline - time.monotonic()))
        with suppress(queue.Empty):
            while True:
                news = self._inbox.get_nowait()
                if isinstance(news, Event):
                    self._log(news)
