"""Execution of a prepared trial on either clock, with its results folder."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from testbed.common.collector import rare_collection
from testbed.prepare import Prepared, count_batches
from testbed.simulation.world import drop_finished
from testbed_controller.results.run import Run
from testbed_controller.running.inputs import InitialWeights
from testbed_controller.running.live import SHOWN_EVENTS, LiveProgress
from testbed_controller.watch.feed import INTERVAL

if TYPE_CHECKING:
    from testbed.trace.events import Event
    from testbed.trace.outcome import Outcome
    from testbed_controller.hosts.lab import AnyLab
    from testbed_controller.hosts.placement import LabPart
    from testbed_controller.results.exporters import Callback
    from testbed_controller.results.recorder import Recorder
    from testbed_controller.results.streams import EventDispatcher

Runtime = Literal["emulate", "simulate"]


@dataclass(frozen=True)
class RunOptions:
    """Options for display and recording of a run and, in containers, for the lab."""

    events: bool = True
    """Whether to write events to the results folder."""
    watch: bool = False
    """Whether to show a live page in the browser."""
    streams: Sequence[str] = ()
    """Further exporters of `testbed_controller.results.streams`, besides those of the scenario."""
    callbacks: Sequence[Callback] = ()
    """Objects of the user that are called with events."""
    links: str = "auto"
    """Name of the link backend."""
    accept_links: bool = False
    """Whether to run despite links outside the tolerance."""
    keep: bool = False
    """Whether to keep the containers afterwards."""
    placement: LabPart | None = None
    """Hosts of the containers; None for the engine of this machine."""
    existing_lab: AnyLab | None = None
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

    Raises the errors of the runtime, of exporters and of callbacks. Events before an error are in the folder; after an
    error at the end, such as that of an exporter that closes its file, the folder has the finished run.
    """
    from testbed_controller.results.recorder import Recorder
    from testbed_controller.results.streams import EventDispatcher

    # Frees the memory of the last simulation before this run allocates its own.
    drop_finished()
    workload = prepared.workload
    recorder = Recorder(
        folder,
        prepared.trial,
        prepared.plan,
        runtime,
        weights=workload.initial_weights(prepared),
        owned=workload.sample_counts(prepared),
        events=options.events,
    )
    try:
        page: AbstractContextManager[None] = nullcontext()
        if options.watch:
            page = _live_page(recorder.path, runtime, console)
        # An exporter that both the scenario and an option name writes once.
        exporters = dict.fromkeys([*options.streams, *prepared.scenario.results.to])
        with (
            page,
            EventDispatcher(recorder.path, exporters, options.callbacks) as stream,
        ):
            outcome = _follow_run(
                prepared, runtime, initial, console, recorder, stream, options
            )
            finished = recorder.finish(workload.export_outcome(prepared, outcome))
            stream.finished = finished
    except BaseException as error:
        recorder.abandon(error)
        raise
    # Imported after the run, since the import would delay the start of the run.
    from testbed_controller.report import boxes, html

    html.write(finished)
    if finished.metrics["series"]["objects"]:
        boxes.write(finished.path, outcome.events, workload.load(prepared))
    return finished


@contextmanager
def _live_page(folder: Path, runtime: str, console: Console) -> Iterator[None]:
    """Serve a live page until the end of the run, and long enough for the page to receive the last events."""
    from testbed_controller.lab import runstate
    from testbed_controller.running.control import strike
    from testbed_controller.watch.server import PageServer

    def strike_run(action: Mapping[str, object]) -> str:
        return strike(runstate.writing(folder), action)

    # A simulation does not run in real time, so nobody can inject a fault at a certain time.
    page = PageServer(folder, strike_run if runtime == "emulate" else None)
    with closing(page):
        console.print(page.address, soft_wrap=True)
        page.show()
        try:
            yield
        finally:
            time.sleep(2 * INTERVAL)


def _follow_run(
    prepared: Prepared,
    runtime: Runtime,
    initial: InitialWeights,
    console: Console,
    recorder: Recorder,
    stream: EventDispatcher,
    options: RunOptions,
) -> Outcome:
    """Execute a trial and show the progress in the terminal."""
    scenario = prepared.scenario
    weights = initial.weights_for(prepared)
    data = prepared.workload.load(prepared)
    total = count_batches(scenario, prepared.plan)
    units = f"{scenario.workload.unit}s"
    with LiveProgress(console, scenario.name, total, units) as live:

        def show(event: Event) -> None:
            stream.event(event)
            live.event(event)

        def record_and_show(event: Event) -> None:
            recorder.event(event)
            show(event)

        if runtime == "simulate":
            from testbed.simulation import simulate
            from testbed_controller.results.streams import CALLBACK_EVENTS

            live.stage("simulating")
            # Events become objects only if shown; the recorder takes them as lines of text, which is much faster.
            shown = {*CALLBACK_EVENTS, *SHOWN_EVENTS}
            lines = recorder.lines if recorder.keeps_events else None
            return simulate(prepared, data, show, weights, names=shown, on_lines=lines)
        from testbed_controller.running.emulation import emulate

        return emulate(
            prepared,
            data,
            record_and_show,
            weights,
            on_stage=live.stage,
            results=recorder.path,
            links=options.links,
            accept_links=options.accept_links,
            keep=options.keep,
            existing_lab=options.existing_lab,
            placement=options.placement,
        )
