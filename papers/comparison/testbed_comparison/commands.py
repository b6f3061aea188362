"""`testbed papers`: run the missing figures of the papers and write their tables."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import click

from testbed import InputError

if TYPE_CHECKING:
    from testbed_comparison.tables import System

PAPERS = Path(__file__).resolve().parents[2]
"""The folder with one folder for each system."""
PAGE = PAPERS.parent / "docs" / "papers.md"
"""The page with the headlines of all papers."""


@click.command()
@click.argument("systems", nargs=-1)
@click.option(
    "--only",
    default="*",
    help="Run only scenarios with names of this pattern, such as 'stahl-table-*'.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Simulate this many runs at a time.",
)
@click.option(
    "--again", is_flag=True, help="Also run scenarios whose results are up to date."
)
@click.option(
    "--list",
    "list_only",
    is_flag=True,
    help="Print the commands of missing and stale scenarios.",
)
@click.option(
    "--tables",
    "tables_only",
    is_flag=True,
    help="Run nothing; write the tables from the kept results.",
)
@click.option(
    "--containers",
    is_flag=True,
    help="Run one short figure of each system in containers and simulated instead, and compare both clocks.",
)
def papers(
    systems: tuple[str, ...],
    only: str,
    jobs: int,
    again: bool,
    list_only: bool,
    tables_only: bool,
    containers: bool,
) -> None:
    """Compare the testbed's metrics with the figures of published papers.

    SYSTEMS are folders of papers/, by default all of them. Scenarios that are missing in results.json of a folder, or
    whose file has changed since, are simulated. The tables of its README.md and of docs/papers.md are written from
    the results. A change of the code makes no result stale; use --again. After Ctrl-C the same command resumes the
    runs, which are kept in results/papers.

    \b
    Examples:
      testbed papers --list
      testbed papers stahl ftpipehd --jobs 2
      testbed papers edgepipe --only 'edgepipe-figure-9*'
      testbed papers --containers
    """
    # Imported in functions: `testbed --help` lists this command and should not wait for torch.
    from testbed_comparison.tables import all_papers_page, fill_in

    folders = {folder.name: folder for folder in system_folders()}
    unknown = sorted(set(systems) - folders.keys())
    if unknown:
        raise InputError(
            f"unknown system '{unknown[0]}'; available: {', '.join(folders)}"
        )
    selected = [folders[name] for name in systems or folders]
    if containers:
        _compare_clocks(selected)
    else:
        for folder in selected:
            _compare(
                folder,
                only=only,
                jobs=jobs,
                again=again,
                list_only=list_only,
                tables_only=tables_only,
            )
    if not list_only:
        # The page has all papers, also those that were not selected.
        all_systems = {}
        for name, folder in folders.items():
            all_systems[name] = open_system(folder)
        page = fill_in(PAGE.read_text(encoding="utf-8"), all_papers_page(all_systems))
        PAGE.write_text(page, encoding="utf-8")


def system_folders() -> list[Path]:
    """Return the folders of all systems in the order of their names.

    Raises `InputError` outside a checkout, where the figures of the papers are missing.
    """
    folders = sorted(file.parent for file in PAPERS.glob("*/figures.yaml"))
    if not folders:
        raise InputError(
            f"{PAPERS}: contains no figures.yaml; papers are compared in a checkout of the testbed"
        )
    return folders


def open_system(folder: Path) -> System:
    """Read the figures of a folder and our kept results.

    >>> open_system(PAPERS / "stahl").figures.paper
    'Stahl et al.'
    """
    from testbed_comparison import tables
    from testbed_comparison.clocks import load_clocks
    from testbed_comparison.results import Results
    from testbed_comparison.rows import load

    figures = load(folder)
    results = Results(folder)
    return tables.System(folder, figures, results, load_clocks(folder))


def _write_page(system: System) -> None:
    from testbed_comparison.plots import draw_plots
    from testbed_comparison.tables import fill_in, system_page

    page = system.folder / "README.md"
    content = system_page(system, draw_plots(system))
    text = fill_in(page.read_text(encoding="utf-8"), content)
    page.write_text(text, encoding="utf-8")


def _compare_clocks(folders: Iterable[Path]) -> None:
    """Run the short figure of each system in containers and simulated."""
    from testbed_comparison.clocks import measure_clocks

    for folder in folders:
        short_figure = open_system(folder).figures.containers
        if short_figure is None:
            raise InputError(f"{folder.name}: figures.yaml has no entry 'containers'")
        clocks = measure_clocks(folder, short_figure)
        for metric in short_figure.metrics:
            ratio = clocks.ratio(metric)
            click.echo(f"{folder.name}: {metric} {ratio:.3f} times the simulated value")
        _write_page(open_system(folder))


def _compare(
    folder: Path,
    *,
    only: str,
    jobs: int,
    again: bool,
    list_only: bool,
    tables_only: bool,
) -> None:
    """Run the missing and stale scenarios of a system and write the system's page, or only print their commands."""
    from testbed_comparison.results import compose_command

    system = open_system(folder)
    figures = system.figures
    results = system.results
    names: set[str] = set()
    if tables_only:
        # Nothing is run.
        pass
    elif again:
        names = {scenario for scenario, _ in figures.values()}
    else:
        names = set(results.scenarios_to_run(figures))
    for name in sorted(names):
        if not fnmatch(name, only):
            continue
        changes = figures.changes.get(name, {})
        click.echo(shlex.join(compose_command(f"papers/{name}", changes)))
        if list_only:
            continue
        results.run(name, figures, jobs=jobs, again=again)
        # Results are saved after each scenario, so that Ctrl-C loses no finished scenario.
        results.save()
    if not list_only:
        # Rows may have been removed from figures.yaml since the values were stored.
        results.prune(figures)
        results.save()
        _write_page(system)
