"""`testbed methods`: the methods that a scenario can name."""

from __future__ import annotations

import click

from controller.cli.options import as_json
from controller.cli.printing import dump, options, print_catalogue
from testbed.common.errors import InputError


@click.command()
@click.argument("name", required=False)
@as_json
def methods(name: str | None, as_json: bool) -> None:
    """List the methods a scenario can name: what each does, for which tasks, and its options. With NAME, one of them.

    \b
    Example:
      testbed methods pipeline

    \b
    Example, in a scenario:
      workload:
        method: {name: pipeline, schedule: 1f1b, micro_batches: 4}
    """
    from testbed.methods import METHODS
    from testbed.scenario.loading import nearest

    if name is not None and name not in METHODS:
        raise InputError(f"there is no method '{name}': {nearest(name, METHODS)}")
    entries = [
        {
            "name": method.name,
            "summary": method.summary,
            "tasks": list(method.tasks),
            "options": options(method.Options),
        }
        for method in METHODS.values()
        if name in (None, method.name)
    ]
    if as_json:
        dump(entries)
    else:
        print_catalogue(entries, lambda entry: f"{entry['summary']} [dim]({', '.join(entry['tasks'])})[/dim]")
