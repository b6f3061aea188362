"""`testbed report` and `testbed compare`: what runs left behind, read again."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import click
from rich.console import Console


@click.command()
@click.argument("folder", metavar="RESULTS_DIR", type=click.Path(path_type=Path))
@click.option(
    "--open",
    "show_page",
    type=click.Choice(["yes", "no"]),
    default="no",
    show_default=True,
    help="Open the HTML report in a browser.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the metrics (of a sweep: its summary) as JSON.")
def report(folder: Path, show_page: str, as_json: bool) -> None:
    """Rebuild the report of a run from its events and print its table.

    RESULTS_DIR is what `testbed run` wrote, such as results/quickstart, or the folder of a sweep. Figures, verdict,
    Perfetto trace and HTML report are written again.

    \b
    Examples:
      testbed report results/quickstart
      testbed report results/quickstart --open yes
    """
    from controller.report import html, paper, sweep
    from controller.report.terminal import show, show_reproduction, show_summary
    from controller.results import reproduction
    from controller.results.files import load_all
    from controller.results.recorder import rebuild
    from controller.results.summary import summarize

    runs = load_all(folder)
    for run in runs:
        rebuild(run)
        html.write(run)
    several = len(runs) > 1 or runs[0].path != folder
    content = summarize(folder, runs) if several else runs[0].metrics
    if several:
        sweep.write(folder, content, runs)
    part = runs[0].trial.scenario.paper
    table = reproduction.reproduce(part, runs) if part else []
    if part:
        reproduction.write(folder, part, table)
        paper.write(folder, part, table, runs)
    console = Console(highlight=False)
    if as_json:
        click.echo(json.dumps(content, indent=2, default=str))
    elif several:
        show_summary(console, content, folder)
    else:
        show(console, runs[0])
    if part and not as_json:
        show_reproduction(console, part.source, table, folder)
    if show_page == "yes":
        page = folder / ("paper.html" if part and several else "sweep.html" if several else "report.html")
        webbrowser.open(page.absolute().as_uri())


@click.command()
@click.argument("folders", metavar="RUN RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the comparison as an HTML page.")
@click.option(
    "--plots",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write its plots into this folder, as SVG and PDF for one and two columns.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def compare(folders: tuple[Path, ...], out: Path | None, plots: Path | None, as_json: bool) -> None:
    """Put runs side by side: their figures, and each as a ratio to the first.

    A folder of a sweep stands for all of its runs; repetitions of one point become one column.
    Warns where the scenarios differ in what nobody swept. An emulated and a simulated run of one scenario are held
    against each other.

    \b
    Examples:
      testbed compare results/quickstart results/simulated
      testbed compare results/sweep --out sweep.html
    """
    from controller.report import comparison
    from controller.report.plots import save_all
    from controller.results.comparison import compare as put_side_by_side
    from controller.results.files import load_all
    from testbed.errors import InputError
    from testbed.trace.metrics import finite

    runs = [run for folder in folders for run in load_all(folder)]
    if len(runs) < 2:
        raise InputError(f"{folders[0]}: is a single run: name at least two to compare")
    compared = finite(put_side_by_side(runs))
    if as_json:
        click.echo(json.dumps(compared, indent=2, default=str))
    else:
        comparison.show(Console(highlight=False), compared)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(comparison.render(runs, compared), encoding="utf-8")
        click.echo(f"written to {out}", err=as_json)
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        names = save_all(plots, comparison.plots(runs, compared))
        click.echo(f"written to {plots}: {', '.join(names)}", err=as_json)
