"""`testbed report` and `testbed compare`: reports and comparisons of finished runs."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from testbed_controller.cli.printing import dump, make_console


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
@click.option(
    "--runs",
    "every_run",
    is_flag=True,
    help="For a sweep, rebuild the report of every run as well.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the metrics (of a sweep: its summary) as JSON.",
)
def report(folder: Path, show_page: str, every_run: bool, as_json: bool) -> None:
    """Rebuild the report of a run from its events and print the summary.

    RESULTS_DIR is a folder written by `testbed run`, such as results/quickstart. Metrics, verdict, Perfetto trace and
    HTML report are written again. For the folder of a sweep, the summary and its pages are written again from the
    metrics of the runs, and missing reports are added.

    \b
    Examples:
      testbed report results/quickstart
      testbed report results/quickstart --open yes
    """
    from testbed_controller.cli.finished import summarize
    from testbed_controller.report import html
    from testbed_controller.report.terminal import show
    from testbed_controller.results.files import (
        is_complete,
        load,
        load_metrics,
        run_folders,
    )
    from testbed_controller.results.recorder import rebuild

    folders = run_folders(folder)
    is_sweep = folders != [folder]
    runs = []
    for run_folder in folders:
        has_report = is_complete(run_folder) and (run_folder / "report.html").is_file()
        # Reading the events of every run of a sweep takes long, and their reports exist already.
        if has_report and is_sweep and not every_run:
            runs.append(load_metrics(run_folder))
            continue
        run = load(run_folder)
        rebuild(run)
        html.write(run)
        # The events of all runs of a sweep may exceed the memory.
        runs.append(run.without_events())
    console = make_console(quiet=as_json)
    if is_sweep:
        content = summarize(folder, runs, console)
        page = folder / "sweep.html"
    else:
        content = runs[0].metrics
        page = folder / "report.html"
        show(console, runs[0])
    if as_json:
        dump(content)
    if show_page == "yes":
        webbrowser.open(page.absolute().as_uri())


@click.command()
@click.argument(
    "folders",
    metavar="RUN RUN...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the comparison as an HTML page.",
)
@click.option(
    "--plots",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the plots into this folder, as SVG and PDF for one and two columns.",
)
@click.option(
    "--latex",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the metrics as a LaTeX table.",
)
@click.option(
    "--series",
    multiple=True,
    metavar="NAME[: LABEL]",
    help="Show only this column, under this label. May be repeated; columns and lines appear in the given order.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def compare(
    folders: tuple[Path, ...],
    out: Path | None,
    plots: Path | None,
    latex: Path | None,
    series: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compare the metrics of runs side by side, each with its ratio to the first run.

    The folder of a sweep stands for all of its runs; repetitions of one point become one column. Differences between
    the scenarios other than those of a sweep cause a warning. An emulated and a simulated run of the same scenario are
    checked against each other.

    \b
    Examples:
      testbed compare results/quickstart results/simulated
      testbed compare results/sweep --out sweep.html
      testbed compare results/sweep --plots plots --series 'rate=5mbit: 5 Mbit/s' --series 'rate=50mbit: 50 Mbit/s'
    """
    from testbed.common.errors import InputError
    from testbed.common.lazy import require_extra
    from testbed.trace.events import finite
    from testbed_controller.report import comparison
    from testbed_controller.report.tables import latex as format_latex
    from testbed_controller.results.comparison import compare as compare_groups
    from testbed_controller.results.comparison import side_by_side
    from testbed_controller.results.files import load_metrics, run_folders

    if plots is not None:
        require_extra("matplotlib", "plots", "--plots")
    runs = []
    for folder in folders:
        for run_folder in run_folders(folder):
            runs.append(load_metrics(run_folder))
    if len(runs) < 2:
        raise InputError(f"{folders[0]}: is a single run: name at least two to compare")
    grouped = side_by_side(runs, series)
    compared = finite(compare_groups(grouped))
    if as_json:
        dump(compared)
    else:
        comparison.show(make_console(), compared)
    # With --json, standard output has only the JSON.
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(comparison.render(grouped, compared), encoding="utf-8")
        click.echo(f"written to {out}", err=as_json)
    if latex is not None:
        latex.parent.mkdir(parents=True, exist_ok=True)
        latex.write_text(
            format_latex(comparison.metrics_of(compared)), encoding="utf-8"
        )
        click.echo(f"written to {latex}", err=as_json)
    if plots is not None:
        from testbed_controller.report.drawing import save_all

        plots.mkdir(parents=True, exist_ok=True)
        names = save_all(plots, comparison.plots(grouped))
        click.echo(f"written to {plots}: {', '.join(names)}", err=as_json)
