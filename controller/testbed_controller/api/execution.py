"""One recorded run: a prepared trial on either clock, and the folder of its results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from testbed.common.collector import rare_collection
from testbed.prepare import Prepared, batches
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
    """How a run is shown and recorded and, in containers, on which lab it takes place."""

    events: bool = True
    """Whether its events are written to its folder."""
    watch: bool = False
    """Whether a page shows it in the browser meanwhile."""
    streams: Sequence[str] = ()
    """Names of `testbed_controller.results.streams`, in addition to those that the scenario names."""
    callbacks: Sequence[Callback] = ()
    links: str = "auto"
    accept_links: bool = False
    """Whether it begins although a link is outside its tolerance."""
    keep: bool = False
    """Whether its containers stay up afterwards."""
    where: LabPart | None = None
    """The hosts of its containers; None is the engine of this machine."""
    standing: AnyLab | None = None
    """A lab that is up, to run on instead of a new one; it stays up."""


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
    """Execute one trial and return its run, which is written to ``folder`` from its first event on.

    Raises the errors of the runtime; everything recorded before an error is in the folder.
    """
    from testbed_controller.results.recorder import Recorder
    from testbed_controller.results.streams import Following

    drop_finished()
    weights, owned = prepared.workload.initial_weights(prepared), prepared.workload.owned(prepared)
    events = options.events
    recorder = Recorder(folder, prepared.trial, prepared.plan, runtime, weights=weights, owned=owned, events=events)
    try:
        page = _page(recorder.path, runtime, console) if options.watch else nullcontext()
        wanted = dict.fromkeys([*options.streams, *prepared.scenario.results.to])
        with page, Following(recorder.path, wanted, options.callbacks) as stream:
            outcome = _follow(prepared, runtime, initial, console, recorder, stream, options)
            finished = stream.finished = recorder.finish(prepared.workload.exported(prepared, outcome))
    except BaseException as error:
        recorder.abandon(error)
        raise
    from testbed_controller.report import boxes, html  # not before the run, which would begin later by that

    html.write(finished)
    if finished.metrics["series"]["objects"]:
        boxes.write(finished.path, outcome.events, prepared.workload.load(prepared))
    return finished


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
    runtime: Runtime,
    initial: InitialWeights,
    console: Console,
    recorder: Recorder,
    stream: Following,
    options: RunOptions,
) -> Outcome:
    """Run one trial and show its progress in the terminal."""
    scenario = prepared.scenario
    weights, data = initial.weights_for(prepared), prepared.workload.load(prepared)
    with LiveProgress(console, scenario.name, batches(scenario, prepared.plan), f"{scenario.workload.unit}s") as live:

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
