"""`testbed papers`: the figures of publications, run again where they are missing or stale."""

from __future__ import annotations

import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from testbed.common.errors import InputError
from testbed_controller.lab.paths import ROOT

if TYPE_CHECKING:
    from testbed_controller.results.papers import Entry

RUNS = Path("results/papers")


@click.command()
@click.argument("patterns", nargs=-1)
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Simulate this many runs at a time.")
@click.option("--again", is_flag=True, help="Run them though nothing of their scenarios has changed.")
@click.option("--list", "listing", is_flag=True, help="Only say which would be run, with their commands.")
def papers(patterns: tuple[str, ...], jobs: int, again: bool, listing: bool) -> None:
    """Run what is missing or stale of all figures of publications, and write docs/papers.md from the results.

    PATTERNS choose scenarios of papers/ by name, as in 'versatilefl-*'; by default all that
    docs/papers.yaml lists. What was run is kept in docs/papers.json: a scenario is run again when it, or what
    docs/papers.yaml changes of it, is another. The paper's figures, readings of it, notes and which row explains
    which are words: they are taken from the scenario and need no run; neither do rows that are new, while
    results/papers has the runs. After Ctrl-C the same command goes on: runs that finished are kept, in
    results/papers, without their events, until those of another version of the scenario take their place.

    \b
    Examples:
      testbed papers --list
      testbed papers 'stahl-*' --jobs 2
    """
    from testbed_controller.results import papers

    docs = ROOT / "docs"
    entries = [
        each
        for each in papers.listed(docs)
        if not patterns or any(fnmatch(each.scenario, pattern) for pattern in patterns)
    ]
    if not entries:
        raise InputError(
            f"docs/papers.yaml lists no scenario like {' or '.join(patterns)}: see 'testbed papers --list'"
        )
    wanted = entries if again else papers.stale(entries, papers.kept(docs))
    if not listing:
        papers.keep(docs, {})
    for entry in wanted:
        click.echo(" ".join(entry.command))
        if listing:
            continue
        runs = RUNS / f"{entry.scenario}-{entry.runs()}"
        if again:
            shutil.rmtree(runs, ignore_errors=True)
        place = ["--resume" if runs.exists() else "--out", str(runs)]
        program = [sys.executable, "-c", "from testbed_controller.cli.main import main; main()"]
        command = [*program, *entry.command[1:], *place, "--jobs", str(jobs), "--no-events"]
        status = subprocess.run(command, check=False).returncode
        if status not in (0, 1):  # 1: a condition of the scenario does not hold, which the table says
            raise click.exceptions.Exit(status)
        papers.keep(docs, {entry.scenario: papers.result(entry, runs) | {"curves": _curves(entry, runs)}})
        for former in RUNS.glob(f"{entry.scenario}-{'[0-9a-f]' * 16}"):
            if former != runs:
                shutil.rmtree(former)
    if not wanted:
        click.echo("nothing is missing or stale")


def _curves(entry: Entry, folder: Path) -> dict[str, Any]:
    from testbed.scenario.loading import load
    from testbed_controller.report import paper
    from testbed_controller.results.files import load_figures, places

    part = load(f"papers/{entry.scenario}", entry.changes).paper
    return {} if part is None else paper.keep(part, [load_figures(place) for place in places(folder)])
