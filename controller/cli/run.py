"""`testbed run`: a scenario, whichever runtime, from the file to the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from controller.cli.options import links, overrides
from controller.running.inputs import InitialWeights, load_data
from controller.running.live import LiveProgress
from testbed.errors import ExpectationError, TestbedError
from testbed.prepare import Prepared, batches, prepare, weights_file
from testbed.scenario.expand import trials
from testbed.scenario.loading import load

if TYPE_CHECKING:
    from controller.lab.lab import LinkBackend
    from controller.results.reproduction import ReproducedRow
    from controller.results.run import Run
    from testbed.scenario.schema import PaperPart
    from testbed.trace.outcome import Outcome


@click.command()
@click.argument("scenario")
@click.option(
    "--runtime",
    type=click.Choice(["emulate", "simulate"]),
    default="emulate",
    show_default=True,
    help="emulate: a container per device on the real clock; simulate: one process on a virtual clock, no Docker.",
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Results folder.  [default: results/<run>]"
)
@overrides
@click.option("--seed", type=int, help="Override the scenario's seed.")
@click.option("--repetitions", type=int, help="Override how often each point is run.")
@links
@click.option("--accept-links", is_flag=True, help="Run even if a link is outside its tolerance (the verdict says so).")
@click.option(
    "--weights",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Begin with these weights: safetensors as a run leaves them, Darknet's for yolov2, or a scenario's, which is "
    "simulated first.",
)
@click.option("--keep", is_flag=True, help="Leave the containers up afterwards, to look at.")
@click.option("--json", "as_json", is_flag=True, help="Print the metrics as JSON, and progress on the error output.")
def run(
    scenario: str,
    runtime: str,
    out: Path | None,
    overrides: tuple[str, ...],
    seed: int | None,
    repetitions: int | None,
    links: LinkBackend,
    accept_links: bool,
    weights: Path | None,
    keep: bool,
    as_json: bool,
) -> None:
    """Run SCENARIO (a file, or the name of one in scenarios/) and report what happened.

    Everything is checked and planned before the first container exists. Ends with 0, with 1 when the run or one of
    its `expect` conditions fails, with 2 for bad input and 3 when this machine cannot serve.

    \b
    Examples:
      testbed run quickstart
      testbed run quickstart --runtime simulate --set network.link.rate=10mbit
      testbed run my.yaml --repetitions 5 --out results/five
    """
    extra = [f"{key}={value}" for key, value in (("seed", seed), ("repetitions", repetitions)) if value is not None]
    if weights is not None:
        # In quotes: whatever the path holds is text.
        extra.append(f"workload.model.weights={json.dumps(str(weights.absolute()))}")
    loaded = load(scenario, [*overrides, *extra])
    prepared = [prepare(trial) for trial in trials(loaded)]
    console = Console(stderr=as_json, highlight=False)
    if len(prepared) > 1:
        from controller.results.publishing import fresh

        # Runs of one sweep lie together, and never among those of an earlier one.
        out = fresh(out or Path("results") / loaded.name)
    initial = InitialWeights(console)
    runs = []
    for number, each in enumerate(prepared):
        if len(prepared) > 1:
            console.print(f"[bold]run {number + 1} of {len(prepared)}[/] {_point(each)}")
        try:
            outcome = _run_one(each, runtime, initial, console, links=links, accept_links=accept_links, keep=keep)
        except TestbedError as error:
            _explain(console, error)
            raise
        runs.append(_keep(each, outcome, _folder(each, out, single=len(prepared) == 1)))
        if not as_json:
            _show(console, runs[-1], brief=len(prepared) > 1)
        if outcome.status == "interrupted":
            break
    if len(prepared) > 1:
        _summarize(runs, console)
    table = _reproduce(loaded.paper, runs, console) if loaded.paper else []
    if as_json:
        shown = [{"run": str(each.path), "metrics": each.metrics} for each in runs]
        click.echo(json.dumps(shown[0] if len(prepared) == 1 else shown, indent=2, default=str))
    _judge(runs, table)


def _point(prepared: Prepared) -> str:
    """Say which run of a sweep or of repetitions this is."""
    from controller.results.run import value_text

    parts = [f"{key}={value_text(value)}" for key, value in prepared.trial.point.items()]
    again = [f"repetition {prepared.trial.repetition + 1}"] if prepared.trial.repetition else []
    return ", ".join([*parts, *again])


def _run_one(
    prepared: Prepared,
    runtime: str,
    initial: InitialWeights,
    console: Console,
    **lab_options: Any,
) -> Outcome:
    scenario = prepared.scenario
    weights, dataset = initial.of(prepared), load_data(prepared)
    unit = "steps" if scenario.workload.task == "train" else "requests"
    with LiveProgress(console, scenario.name, batches(scenario), unit) as live:
        if runtime == "simulate":
            from testbed.simulation import simulate

            live.stage("simulating")
            return simulate(prepared, dataset, live.event, weights)
        from controller.running.emulation import emulate

        return emulate(prepared, dataset, live.event, weights, on_stage=live.stage, **lab_options)


def _explain(console: Console, error: TestbedError) -> None:
    from controller.report.measurements import measurements_table
    from controller.running.verification import LinksError

    if isinstance(error, LinksError):
        console.print(measurements_table(error.measurements))


def _folder(prepared: Prepared, out: Path | None, *, single: bool) -> Path:
    """Return where one run's results go: the folder asked for, or inside it where there are several."""
    from controller.results.run import run_name

    name = run_name(prepared.trial)
    if single:
        return out or Path("results") / name
    return (out or Path("results") / prepared.scenario.name) / name


def _keep(prepared: Prepared, outcome: Outcome, folder: Path) -> Run:
    from controller.report import boxes, html
    from controller.results import files
    from testbed.models.weights import facts

    file = weights_file(prepared.scenario)
    weights = None if file is None else facts(file, prepared.problem.model)
    finished = files.load(files.write(folder, prepared.trial, prepared.plan, outcome, weights=weights))
    html.write(finished)
    if any(event.event == "objects" for event in outcome.events):
        boxes.write(finished.path, outcome.events, load_data(prepared))
    return finished


def _show(console: Console, finished: Run, *, brief: bool) -> None:
    from controller.report.terminal import show, show_briefly

    if brief and finished.outcome.status == "finished":
        show_briefly(console, finished)
    else:
        show(console, finished)


def _summarize(runs: list[Run], console: Console) -> None:
    from controller.report.terminal import show_summary
    from controller.results.summary import summarize

    folder = runs[0].path.parent
    show_summary(console, summarize(folder), folder)


def _reproduce(part: PaperPart, runs: list[Run], console: Console) -> list[ReproducedRow]:
    from controller.report import paper
    from controller.report.terminal import show_reproduction
    from controller.results import reproduction

    folder = runs[0].path.parent if len(runs) > 1 else runs[0].path
    table = reproduction.reproduce(part, runs)
    reproduction.write(folder, part, table)
    paper.write(folder, part, table, runs)
    show_reproduction(console, part.source, table, folder)
    return table


def _judge(runs: list[Run], table: list[ReproducedRow]) -> None:
    """Raise what decides the exit status: a run that failed, or an expectation that does not hold."""
    for finished in runs:
        if finished.outcome.status != "finished":
            error: Any = (finished.outcome.error or "").strip().splitlines() or ["no reason known"]
            ended = "was interrupted" if finished.outcome.status == "interrupted" else finished.outcome.status
            raise TestbedError(f"the run {ended}: {error[-1]}; its events are in {finished.path}")
    missed = [
        f"{expectation.key} is {expectation.value}, expected {expectation.condition}"
        for finished in runs
        for expectation in finished.expectations
        if not expectation.holds
    ]
    missed += [f"{row.name} is {row.ours}, expected {row.condition}" for row in table if row.holds is False]
    if missed:
        raise ExpectationError("; ".join(missed))
