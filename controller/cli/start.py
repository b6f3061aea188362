"""`testbed start`: the workload of a scenario on a lab that stands."""

from __future__ import annotations

from pathlib import Path

import click

from controller.cli.options import accept_links, metrics_as_json, out, overrides, run_option, watched
from controller.cli.printing import dump, make_console


@click.command()
@click.argument("scenario")
@run_option
@out
@overrides
@accept_links
@watched
@metrics_as_json
def start(
    scenario: str,
    run_id: str | None,
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
    from controller.cli.finished import explain, judge, show_run
    from controller.hosts.lab import open_lab
    from controller.lab import runstate
    from controller.results.recorder import numbered
    from controller.results.run import run_name
    from controller.running.inputs import InitialWeights
    from testbed.common.errors import TestbedError
    from testbed.prepare import prepare
    from testbed.scenario.expand import trials
    from testbed.scenario.loading import load

    prepared = prepare(trials(load(scenario, overrides))[0])
    lab = open_lab(runstate.choose(run_id))
    lab.check_serves(prepared.trial)
    console = make_console(stderr=as_json)
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
        dump({"run": str(finished.path), "metrics": finished.metrics})
    else:
        show_run(console, finished, brief=False)
    judge([finished], [])
