"""Runs and what is kept of them: one by one on either clock, or simulated side by side."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from io import StringIO
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rich.console import Console

from testbed.common import formats
from testbed.common.logs import PACKAGES
from testbed.prepare import Prepared, batches, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.scenario.points import value_text
from testbed.simulation.world import drop_finished, rare_collection
from testbed.wire import tensors
from testbed_controller.results.files import load_figures
from testbed_controller.results.run import Run
from testbed_controller.running.inputs import InitialWeights, load_data
from testbed_controller.running.live import SHOWN, LiveProgress
from testbed_controller.watch.feed import INTERVAL

if TYPE_CHECKING:
    from queue import Queue

    import torch

    from testbed.trace.events import Event
    from testbed.trace.outcome import Outcome
    from testbed_controller.hosts.placement import LabPart
    from testbed_controller.results.recorder import Recorder
    from testbed_controller.results.streams import Callback, Following

T = TypeVar("T")
LOOK_SECONDS = 5.0
Done = Callable[[int, Run], None]
"""Takes the number of a run and the run when it is over."""


@rare_collection()
def run_recorded(
    prepared: Prepared,
    runtime: Literal["emulate", "simulate"],
    folder: Path,
    initial: InitialWeights,
    console: Console,
    *,
    watch: bool = False,
    streams: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    events: bool = True,
    **lab_options: Any,
) -> Run:
    """Run one trial and write it to ``folder`` from its first event on; return the run as it lies there.

    With ``watch`` a page shows it in the browser meanwhile; ``streams`` name those of
    `testbed_controller.results.streams` beside those that the scenario names and ``callbacks`` of one's own.
    Without ``events`` none are written.
    Raises what the runtime raises; what was seen until then is in the folder.
    """
    from testbed.ml.models.weights import facts
    from testbed_controller.results.recorder import Recorder
    from testbed_controller.results.streams import Following

    drop_finished()
    file = prepared.scenario.weights_file
    weights = None if file is None else facts(file, prepared.problem.model)
    owned = prepared.owned()
    recorder = Recorder(folder, prepared.trial, prepared.plan, runtime, weights=weights, owned=owned, events=events)
    try:
        page = _page(recorder.path, runtime, console) if watch else nullcontext()
        wanted = dict.fromkeys([*streams, *prepared.scenario.results.to])
        with page, Following(recorder.path, wanted, callbacks) as stream:
            outcome = _follow(prepared, runtime, initial, console, recorder, stream, **lab_options)
            finished = stream.finished = recorder.finish(_with_own_names(outcome, prepared))
    except BaseException as error:
        recorder.abandon(error)
        raise
    from testbed_controller.report import boxes, html  # not before the run, which would begin later by that

    html.write(finished)
    if finished.metrics["series"]["objects"]:
        boxes.write(finished.path, outcome.events, load_data(prepared))
    return finished


def _with_own_names(outcome: Outcome, prepared: Prepared) -> Outcome:
    """Return an outcome whose weights have the names of the user's own network, where there is one."""
    from testbed.ml.models.weights import exported, plain_name

    problem = prepared.problem
    if problem.model.builder is None:
        return outcome
    parts = {}
    for device, part in outcome.parts.items():
        held = tensors.to_torch(tensors.read(bytearray(part))[0])
        parts[device] = _file({plain_name(name): tensor for name, tensor in held.items()})
    whole = None if outcome.weights is None else _file(exported(outcome.weights, problem.model, problem.seed))
    return replace(outcome, weights_file=whole, parts=parts)


def _file(weights: Mapping[str, torch.Tensor]) -> bytes:
    return b"".join(tensors.write(tensors.from_torch(weights)))


@contextmanager
def _page(folder: Path, runtime: str, console: Console) -> Iterator[None]:
    """Show a run in the browser until it is over and the page has had the time to hear of it."""
    from testbed_controller.lab import runstate
    from testbed_controller.running.control import strike
    from testbed_controller.watch.server import PageServer

    page = PageServer(folder, (lambda given: strike(runstate.writing(folder), given)) if runtime == "emulate" else None)
    console.print(page.address, soft_wrap=True)
    page.show()
    try:
        yield
    finally:
        time.sleep(2 * INTERVAL)
        page.close()


def _follow(
    prepared: Prepared,
    runtime: Literal["emulate", "simulate"],
    initial: InitialWeights,
    console: Console,
    recorder: Recorder,
    stream: Following,
    **lab_options: Any,
) -> Outcome:
    """Run one trial under the eyes of the terminal."""
    scenario = prepared.scenario
    weights, dataset = initial.of(prepared), load_data(prepared)
    unit = "steps" if scenario.workload.task == "train" else "requests"
    with LiveProgress(console, scenario.name, batches(scenario, prepared.plan), unit) as live:

        def show(event: Event) -> None:
            stream.event(event)
            live.event(event)

        def see(event: Event) -> None:
            recorder.event(event)
            show(event)

        if runtime == "simulate":
            from testbed.simulation import simulate
            from testbed_controller.results.streams import FOLLOWED

            live.stage("simulating")
            shown = {*FOLLOWED, *SHOWN}
            lines = recorder.lines if recorder.keeps_events else None
            return simulate(prepared, dataset, show, weights, names=shown, on_lines=lines)
        from testbed_controller.running.emulation import emulate

        return emulate(prepared, dataset, see, weights, on_stage=live.stage, results=recorder.path, **lab_options)


def run_one_by_one(
    todo: Mapping[int, tuple[Prepared, Path]],
    runtime: Literal["emulate", "simulate"],
    console: Console,
    done: Done,
    **lab_options: Any,
) -> None:
    """Run trials in a row, each into its folder, until the last or until the user stops one."""
    initial = InitialWeights(console)
    began = time.monotonic()
    for over, (number, (prepared, folder)) in enumerate(todo.items()):
        if len(todo) > 1:
            left = _left(began, over, len(todo))
            console.print(f"[bold]run {over + 1} of {len(todo)}[/] {_point(prepared)}{left}")
        finished = run_recorded(prepared, runtime, folder, initial, console, **lab_options)
        done(number, finished)
        if finished.outcome.status == "interrupted":
            return


def simulate_side_by_side(
    scenario: str,
    changes: Sequence[str],
    todo: Mapping[int, Path],
    jobs: int,
    console: Console,
    done: Done,
    *,
    events: bool = True,
) -> None:
    """Simulate the trials of these numbers, ``jobs`` at a time, each in a process of its own.

    ``scenario`` and ``changes`` are what `testbed.scenario.loading.load` takes, ``events`` what `run_recorded` does. A
    trial that cannot be run ends all.
    """
    console.print(f"{len(todo)} runs, {jobs} at once")
    _side_by_side(jobs, partial(simulate_one, scenario, list(changes), events=events), todo, console, done)


def emulate_side_by_side(
    scenario: str,
    changes: Sequence[str],
    todo: Mapping[int, Path],
    where: LabPart,
    options: Mapping[str, Any],
    console: Console,
    done: Done,
) -> None:
    """Run the trials of these numbers in containers, one at a time on each host, each in a process of its own.

    ``options`` are those of `emulate`. A trial that cannot be run ends all, once those under way are over. Raises what
    `reach_all` and `manager` do.
    """
    from testbed_controller.hosts.contexts import manager, reach_all

    managing = manager(reach_all(where.hosts)).name  # makes the networks of all
    free = get_context("spawn").Manager().Queue()
    for host in where.hosts:
        free.put(host)
    console.print(f"{len(todo)} runs, one at a time on each of {', '.join(where.hosts)}")
    one = partial(emulate_one, scenario, list(changes), free=free, managing=managing, options=dict(options))
    _side_by_side(len(where.hosts), one, todo, console, done)


def _side_by_side(
    jobs: int, run_one: Callable[[int, Path], Path], todo: Mapping[int, Path], console: Console, done: Done
) -> None:
    level = logging.getLogger("testbed_controller").level
    # Spawned, since torch's threads do not survive a fork.
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=_prepare_child, initargs=(level,)
    ) as pool:
        try:
            submit = lambda number: pool.submit(run_one, number, todo[number])  # noqa: E731
            take_in(todo, submit, lambda _number, ended: ended.result(), console, done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _prepare_child(level: int) -> None:
    """Log from the parent's level on, and end this process with it: it would finish its run, and then wait for ever."""
    for name in PACKAGES:
        logging.getLogger(name).setLevel(level)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def simulate_one(scenario: str, changes: Sequence[str], number: int, folder: Path, *, events: bool = True) -> Path:
    """Simulate one trial of a scenario into a folder, and return that."""
    return _run_one(prepare(trials(load(scenario, changes))[number]), "simulate", folder, events=events)


def emulate_one(
    scenario: str,
    changes: Sequence[str],
    number: int,
    folder: Path,
    free: Queue[str],
    managing: str,
    options: dict[str, Any],
) -> Path:
    """Run one trial of a scenario into a folder, on a host that is free, and return the folder."""
    prepared, host = prepare(trials(load(scenario, changes))[number]), free.get()
    places = {"hosts": sorted({host, managing}), "place": {each.name: host for each in prepared.experiment.devices}}
    try:
        return _run_one(prepared, "emulate", folder, **options, **places)
    finally:
        free.put(host)


def _run_one(prepared: Prepared, runtime: Literal["emulate", "simulate"], folder: Path, **options: Any) -> Path:
    silent = Console(file=StringIO())
    return run_recorded(prepared, runtime, folder, InitialWeights(silent), silent, **options).path


def take_in(
    todo: Iterable[int],
    submit: Callable[[int], Future[T]],
    place: Callable[[int, Future[T]], Path],
    console: Console,
    done: Done,
    *,
    lost: Callable[[int, Future[T]], Literal["again", "given up"] | None] = lambda _number, _ended: None,
    at_once: Callable[[], int] = lambda: sys.maxsize,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Submit runs, so many at once, and pass them on as they end.

    ``place`` says in which folder one lies, unless it is ``lost``, and to be submitted again or given up. ``look`` is
    called every `LOOK_SECONDS` in which none ends.
    """
    began, waiting, left = time.monotonic(), list(todo), dict[Future[T], int]()
    total = len(waiting)
    while waiting or left:
        while waiting and len(left) < at_once():
            number = waiting.pop(0)
            left[submit(number)] = number
        over = wait(left, LOOK_SECONDS, return_when=FIRST_COMPLETED).done
        if not over:
            look()
        for ended in over:
            number = left.pop(ended)
            if (verdict := lost(number, ended)) is not None:
                waiting += [number] if verdict == "again" else []
                continue
            count = total - len(left) - len(waiting)
            finished = load_figures(place(number, ended))
            console.print(f"[bold]{count} of {total}[/] {finished.path.name}{_left(began, count, total)}")
            done(number, finished)


def _left(began: float, over: int, total: int) -> str:
    """Say how long the rest takes, judged by what is over; nothing where that says nothing yet."""
    if not 0 < over < total:
        return ""
    return f", about {formats.seconds((time.monotonic() - began) / over * (total - over))} left"


def _point(prepared: Prepared) -> str:
    """Say which run of a sweep or of repetitions this is."""
    parts = [f"{key}={value_text(value)}" for key, value in prepared.trial.point.items()]
    again = [f"repetition {prepared.trial.repetition + 1}"] if prepared.trial.repetition else []
    return ", ".join([*parts, *again])
