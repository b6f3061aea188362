"""Execution of a prepared trial on either clock, with its results folder."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from testbed.common.collector import rare_collection
from testbed.prepare import Prepared, count_batches
from testbed.simulation.world import drop_finished
from testbed_controller.results.run import Run
from testbed_controller.running.inputs import InitialWeights
from testbed_controller.running.live import SHOWN, LiveProgress
from testbed_controller.watch.feed import INTERVAL

if TYPE_CHECKING:
    from testbed.trace.events import Event
    from testbed.trace.outcome import Outcome
    from testbed_controller.hosts.lab import AnyLab
    from testbed_controller.hosts.placement import LabPart
    from testbed_controller.results.exporters import Callback
    from testbed_controller.results.recorder import Recorder
    from testbed_controller.results.streams import Following

Runtime = Literal["emulate", "simulate"]


@dataclass(frozen=True)
class RunOptions:
    """Options for display and recording of a run and, in containers, for its lab."""

    events: bool = True
    """Whether to write events to the results folder."""
    watch: bool = False
    """Whether to show a live page in the browser."""
    streams: Sequence[str] = ()
    """Further exporters of `testbed_controller.results.streams`, besides those of the scenario."""
    callbacks: Sequence[Callback] = ()
    links: str = "auto"
    accept_links: bool = False
    """Whether to run despite links outside the tolerance."""
    keep: bool = False
    """Whether to keep the containers afterwards."""
    where: LabPart | None = None
    """Hosts of the containers; None for the engine of this machine."""
    standing: AnyLab | None = None
    """A running lab to use instead of a new one; kept afterwards."""


DEFAULTS = RunOptions()


@rare_collection()
def run_recorded(
    prepared: Prepared,
    runtime: Runtime,
    folder: Path,
    initial: InitialWeights,
    console: Console,
    options: RunOptions = DEFAULTS,
) -> Run:
    """Execute a trial and return the run, recorded in ``folder`` from the first event.

    Raises the errors of the runtime; everything recorded before an error is in the folder.
    """
    from testbed_controller.results.recorder import Recorder
    from testbed_controller.results.streams import Following

    drop_finished()
    weights, owned = (
        prepared.workload.initial_weights(prepared),
        prepared.workload.sample_counts(prepared),
    )
    events = options.events
    recorder = Recorder(
        folder,
        prepared.trial,
        prepared.plan,
        runtime,
        weights=weights,
        owned=owned,
        events=events,
    )
    try:
        page = (
            _live_page(recorder.path, runtime, console)
            if options.watch
            else nullcontext()
        )
        wanted = dict.fromkeys([*options.streams, *prepared.scenario.results.to])
        with page, Following(recorder.path, wanted, options.callbacks) as stream:
            outcome = _follow_run(
                prepared, runtime, initial, console, recorder, stream, options
            )
            finished = stream.finished = recorder.finish(
                prepared.workload.export_outcome(prepared, outcome)
            )
    except BaseException as error:
        recorder.abandon(error)
        raise
    from testbed_controller.report import (
        boxes,
        html,
    )  # not before the run, which would begin later by that

    html.write(finished)
    if finished.metrics["series"]["objects"]:
        boxes.write(finished.path, outcome.events, prepared.workload.load(prepared))
    return finished


@contextmanager
def _live_page(folder: Path, runtime: str, console: Console) -> Iterator[None]:
    """Serve a live page until the end of the run, with time for the page to receive the last events."""
    from testbed_controller.lab import runstate
    from testbed_controller.running.control import strike
    from testbed_controller.watch.server import PageServer

    page = PageServer(
        folder,
        (lambda given: strike(runstate.writing(folder), given))
        if runtime == "emulate"
        else None,
    )
    console.print(page.address, soft_wrap=True)
    page.show()
    try:
        yield
    finally:
        time.sleep(2 * INTERVAL)
        page.close()


def _follow_run(
    prepared: Prepared,
    runtime: Runtime,
    initial: InitialWeights,
    console: Console,
    recorder: Recorder,
    stream: Following,
    options: RunOptions,
) -> Outcome:
    """Execute a trial and show its progress in the terminal."""
    scenario = prepared.scenario
    weights, data = initial.weights_for(prepared), prepared.workload.load(prepared)
    with LiveProgress(
        console,
        scenario.name,
        count_batches(scenario, prepared.plan),
        f"{scenario.workload.unit}s",
    ) as live:

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
            return simulate(prepared, data, show, weights, names=shown, on_lines=lines)
        from testbed_controller.running.emulation import emulate

        return emulate(
            prepared,
            data,
            see,
            weights,
            on_stage=live.stage,
            results=recorder.path,
            links=options.links,
            accept_links=options.accept_links,
            keep=options.keep,
            standing=options.standing,
            where=options.where,
        )
