"""Executors of prepared runs: sequentially in this process, in several processes, or one run per host.

All executors implement `Executor`, including `testbed_controller.api.cluster.Cluster`. A run is sent to another process
as its `Trial`, which is plain data, and prepared there again, because method, model and plan may hold user code.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import StringIO
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from rich.console import Console
from rich.markup import escape

from testbed.common import formats
from testbed.common.logs import PACKAGES
from testbed.prepare import Prepared, prepare
from testbed.scenario.loading import parse
from testbed.scenario.points import value_text
from testbed_controller.api.execution import DEFAULTS, RunOptions, Runtime, run_recorded
from testbed_controller.results.files import load_metrics
from testbed_controller.results.run import Run
from testbed_controller.running.inputs import InitialWeights

if TYPE_CHECKING:
    from queue import Queue

    from testbed.scenario.schema import Trial

T = TypeVar("T")
POLL_SECONDS = 5.0
"""Time without an ended run after which `collect` calls ``on_poll``; only a cluster has workers to check."""
Done = Callable[[int, Run], None]
"""Callback with the number of a run, its key in the mapping of `Executor.execute`, and the finished run."""


@dataclass(frozen=True)
class PlannedRun:
    """A prepared trial with a results folder."""

    prepared: Prepared
    folder: Path

    @property
    def trial(self) -> Trial:
        """The serialisable part of the run."""
        return self.prepared.trial


class Executor(Protocol):
    """Executes runs, each with a separate results folder."""

    def execute(
        self, runs: Mapping[int, PlannedRun], console: Console, done: Done
    ) -> None:
        """Execute all runs, given by number; call ``done`` with the number of each finished run and the run.

        Callers choose the numbers, which need not be consecutive.

        An error of a run is raised after the runs in progress have ended, and later runs are not started.
        """


@dataclass(frozen=True)
class InTurn:
    """Executes runs sequentially in the current process, until the last one or until the user interrupts."""

    runtime: Runtime
    options: RunOptions = DEFAULTS

    def execute(
        self, runs: Mapping[int, PlannedRun], console: Console, done: Done
    ) -> None:
        """See `Executor.execute`."""
        # One object for all runs, so that runs with equal initial weights read or train them once.
        initial = InitialWeights(console)
        began = time.monotonic()
        for finished_runs, (number, run) in enumerate(runs.items()):
            if len(runs) > 1:
                rest = _estimate_rest(began, finished_runs, len(runs))
                title = f"[bold]run {finished_runs + 1} of {len(runs)}[/]"
                # Escaped, since rich reads brackets in a label as its markup.
                console.print(f"{title} {escape(_point_name(run.trial))}{rest}")
            finished = run_recorded(
                run.prepared, self.runtime, run.folder, initial, console, self.options
            )
            done(number, finished)
            if finished.outcome.status == "interrupted":
                return


@dataclass(frozen=True)
class Processes:
    """Simulates several runs in parallel, each in a separate process."""

    jobs: int
    options: RunOptions = DEFAULTS

    def execute(
        self, runs: Mapping[int, PlannedRun], console: Console, done: Done
    ) -> None:
        """See `Executor.execute`."""
        console.print(f"{len(runs)} runs, {self.jobs} at once")
        with _process_pool(self.jobs) as pool:

            def submit(number: int) -> Future[Path]:
                run = runs[number]
                return pool.submit(simulate_trial, run.trial, run.folder, self.options)

            collect(runs, submit, _result_folder, console, done)


@dataclass(frozen=True)
class OneRunPerHost:
    """Executes runs in containers, one at a time per host, each in a separate process."""

    hosts: tuple[str, ...]
    options: RunOptions = DEFAULTS

    def execute(
        self, runs: Mapping[int, PlannedRun], console: Console, done: Done
    ) -> None:
        """Execute all runs; see `Executor.execute`.

        Raises the errors of `reach_all` and `find_manager`: InputError for a context that is unknown or cannot be used,
        or for two contexts of one engine; HostError if an engine does not respond, or if the hosts are not in one
        Docker swarm with a manager among them.
        """
        from testbed_controller.hosts.contexts import find_manager, reach_all

        # The hosts are joined by a Docker swarm. Only a manager of the swarm can create the networks of a run, so each
        # run includes this host, even if all of its devices are on another one.
        managing_host = find_manager(reach_all(self.hosts)).name
        # A queue in a separate process (a "manager" of multiprocessing, not of the swarm), since a plain queue
        # cannot be an argument of a pool's jobs.
        free_hosts = get_context("spawn").Manager().Queue()
        for host in self.hosts:
            free_hosts.put(host)
        console.print(
            f"{len(runs)} runs, one at a time on each of {', '.join(self.hosts)}"
        )
        with _process_pool(len(self.hosts)) as pool:

            def submit(number: int) -> Future[Path]:
                run = runs[number]
                return pool.submit(
                    _emulate_on_free_host,
                    run.trial,
                    run.folder,
                    self.options,
                    free_hosts,
                    managing_host,
                )

            collect(runs, submit, _result_folder, console, done)


@contextmanager
def _process_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    level = logging.getLogger("testbed_controller").level
    # Spawned, since torch's threads do not survive a fork.
    with ProcessPoolExecutor(
        processes,
        mp_context=get_context("spawn"),
        initializer=_prepare_child,
        initargs=(level,),
    ) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _prepare_child(level: int) -> None:
    """Use the parent's log level, and exit when the parent dies; an orphan would wait forever."""
    for name in PACKAGES:
        logging.getLogger(name).setLevel(level)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def simulate_trial(trial: Trial, folder: Path, options: RunOptions) -> Path:
    """Simulate a trial received from another process; return the results folder."""
    return _execute_run(prepare(trial), "simulate", folder, options)


def _emulate_on_free_host(
    trial: Trial,
    folder: Path,
    options: RunOptions,
    free_hosts: Queue[str],
    managing_host: str,
) -> Path:
    from testbed_controller.hosts.placement import LabPart

    # Prepared first, as a host is busy from `get` on.
    prepared = prepare(trial)
    host = free_hosts.get()
    place = {device.name: host for device in trial.experiment.devices}
    # A set, since the free host may be the managing one; sorted, since the order of a set is random.
    hosts = sorted({host, managing_host})
    try:
        placement = parse(LabPart, {"hosts": hosts, "place": place})
        host_options = replace(options, placement=placement)
        return _execute_run(prepared, "emulate", folder, host_options)
    finally:
        free_hosts.put(host)


def _execute_run(
    prepared: Prepared, runtime: Runtime, folder: Path, options: RunOptions
) -> Path:
    silent = Console(file=StringIO())
    initial = InitialWeights(silent)
    run = run_recorded(prepared, runtime, folder, initial, silent, options)
    return run.path


def _result_folder(_number: int, ended: Future[Path]) -> Path:
    return ended.result()


def collect(
    numbers: Iterable[int],
    submit: Callable[[int], Future[T]],
    result_folder: Callable[[int, Future[T]], Path],
    console: Console,
    done: Done,
    *,
    check_loss: Callable[
        [int, Future[T]], Literal["again", "given up"] | None
    ] = lambda _number, _ended: None,
    max_running: Callable[[], int] = lambda: sys.maxsize,
    on_poll: Callable[[], None] = lambda: None,
) -> None:
    """Submit the runs of some numbers, at most ``max_running()`` at a time, and call ``done`` with each finished run.

    ``result_folder`` returns the results folder of a run, or raises its error. ``check_loss`` is called for every ended
    run. It returns None unless the run was lost with its worker, and otherwise whether the run is submitted again or
    given up. ``on_poll`` is called every `POLL_SECONDS` without an ended run. The printed progress includes runs
    that were given up.
    """
    began = time.monotonic()
    waiting = list(numbers)
    submitted: dict[Future[T], int] = {}
    total = len(waiting)
    while waiting or submitted:
        while waiting and len(submitted) < max_running():
            number = waiting.pop(0)
            submitted[submit(number)] = number
        ended_runs = wait(submitted, POLL_SECONDS, return_when=FIRST_COMPLETED).done
        if not ended_runs:
            on_poll()
        for ended in ended_runs:
            number = submitted.pop(ended)
            decision = check_loss(number, ended)
            if decision == "again":
                waiting.append(number)
            if decision is not None:
                continue
            # Includes runs that were given up, since nothing of them is left to execute.
            count = total - len(submitted) - len(waiting)
            # Without events, which a sweep of many runs could not hold in memory.
            finished = load_metrics(result_folder(number, ended))
            rest = _estimate_rest(began, count, total)
            name = escape(finished.path.name)
            console.print(f"[bold]{count} of {total}[/] {name}{rest}")
            done(number, finished)


def _estimate_rest(began: float, finished: int, total: int) -> str:
    """Return the estimated remaining time as text; empty before the first run has finished."""
    if not 0 < finished < total:
        return ""
    seconds_per_run = (time.monotonic() - began) / finished
    return f", about {formats.seconds(seconds_per_run * (total - finished))} left"


def _point_name(trial: Trial) -> str:
    """Return the point of a sweep and the repetition as text."""
    parts = [f"{key}={value_text(value)}" for key, value in trial.point.items()]
    if trial.repetition:
        parts.append(f"repetition {trial.repetition + 1}")
    return ", ".join(parts)
