"""`testbed methods`: the methods that a scenario can name."""

from __future__ import annotations

import click

from controller.cli.options import as_json
from controller.cli.printing import dump, options, print_catalogue


@click.command()
@as_json
def methods(as_json: bool) -> None:
    """List the methods a scenario can name: what each does, for which tasks, and its options.

    \b
    Example, in a scenario:
      workload:
        method: {name: pipeline, schedule: 1f1b, micro_batches: 4}
    """
    from testbed.methods import METHODS

    entries = [
        {
            "name": method.name,
            "summary": method.summary,
            "tasks": list(method.tasks),
            "options": options(method.Options),
        }
        for method in METHODS.values()
    ]
    if as_json:
        dump(entries)
    else:
        print_catalogue(entries, lambda entry: f"{entry['summary']} [dim]({', '.join(entry['tasks'])})[/dim]")
