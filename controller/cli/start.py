"""`testbed start`: the workload of a scenario on a lab that stands."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from controller.cli.options import overrides


@click.command()
@click.argument("scenario")
@click.option("--run", help="Which lab; may be left out when there is only one.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Results folder, new or empty.  [default: results/<run>, with a number where that exists]",
)
@overrides
@click.option("--accept-links", is_flag=True, help="Run even if a link is outside its tolerance (the verdict says so).")
@click.option("--watch", is_flag=True, help="Show the run in the browser while it goes on; see `testbed watch`.")
@click.option("--json", "as_json", is_flag=True, help="Print the metrics as JSON, and progress on the error output.")
def start(
    scenario: str,
    run: str | None,
    out: Path | None,
    overrides: tuple[str, ...],
    accept_links: bool,
    watch: bool,
    as_json: bool,
) -> None:
    """Run the workload of SCENARIO on the lab that `testbed up SCENARIO` made, and leave the lab up.

    Its devices and network are those of the lab; method, model, programs, faults and lengths may be others than at the
    last start. Ends as `testbed run` does.

    \b
    Examples:
      testbed up quickstart && testbed start quickstart
      testbed start quickstart --set workload.method.name=gpipe
    """
    from controller.api.execution import run_recorded
    from controller.cli.run import explain, judge, show_run
    from controller.lab import runstate
    from controller.lab.lab import Lab
    from controller.results.recorder import numbered
    from controller.results.run import run_name
    from controller.running.inputs import InitialWeights
    from testbed.errors import TestbedError
    from testbed.prepare import prepare
    from testbed.scenario.expand import trials
    from testbed.scenario.loading import load

    prepared = prepare(trials(load(scenario, overrides))[0])
    lab = Lab.open(runstate.choose(run))
    lab.check_serves(prepared.trial)
    console = Console(stderr=as_json, highlight=False)
    try:
        finished = run_recorded(
            prepared,
            "emulate",
            out or numbered(Path("results") / run_name(prepared.trial)),
            InitialWeights(console),
            console,
            watch=watch,
            standing=lab,
            accept_links=accept_links,
        )
    except TestbedError as error:
        explain(console, error)
        raise
    if as_json:
        click.echo(json.dumps({"run": str(finished.path), "metrics": finished.metrics}, indent=2, default=str))
    else:
        show_run(console, finished, brief=False)
    judge([finished], [])
