"""`testbed hosts`: the engines that runs can be spread over."""

from __future__ import annotations

from dataclasses import asdict

import click

from controller.cli.options import as_json
from controller.cli.printing import dump, print_table
from testbed.common import formats


@click.command()
@click.argument("contexts", nargs=-1)
@as_json
def hosts(contexts: tuple[str, ...], as_json: bool) -> None:
    """List the engines of docker contexts: what runs over several hosts find there, and what is missing.

    CONTEXTS are those to look at, by default all there are. Clock, round trip and rate are measured over the
    connection of each context, by a container that is removed at once, where the images are there already.

    \b
    Example:
      testbed hosts node1 node2
    """
    from controller.hosts.survey import survey

    found = survey(contexts)
    if as_json:
        dump([asdict(each) for each in found])
        return
    rows = [
        [
            each.context,
            each.node + (" (manager)" if each.manager else ""),
            each.address,
            "" if each.cores is None else str(each.cores),
            "" if each.memory is None else formats.size(each.memory),
            each.engine,
            ", ".join(each.images),
            "" if each.offset is None else f"{each.offset * 1e3:+.2f} ms",
            "" if each.uncertainty is None else f"{each.uncertainty * 1e3:.2f} ms",
            "" if each.round_trip is None else f"{each.round_trip * 1e3:.2f} ms",
            "" if each.rate is None else formats.rate(each.rate),
        ]
        for each in found
    ]
    titles = ["context", "node", "address", "cores", "memory", "engine", "images", "clock", "+-", "round trip", "rate"]
    print_table(titles, rows)
    for each in found:
        for text in each.missing:
            click.echo(f"{each.context}: {text}" if not text.startswith(f"{each.context}:") else text)
