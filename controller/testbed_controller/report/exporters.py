"""The testbed's writers of finished results, registered in `testbed_controller.results.exporters`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from testbed.common.errors import InputError
from testbed.common.lazy import require_extra
from testbed_controller.results import perfetto
from testbed_controller.results.rows import all_tables, points, write_tables
from testbed_controller.results.run import Run
from testbed_controller.results.summary import summary_of


def _refuse_metrics(metrics: Sequence[str]) -> None:
    if metrics:
        raise InputError(
            "--metric requires --plots or --latex, and the results of a sweep"
        )


def _write_tables(
    runs: Sequence[Run], folder: Path, metrics: Sequence[str], file_format: str
) -> None:
    _refuse_metrics(metrics)
    tables = {"points": points(runs)} if len(runs) > 1 else all_tables(runs[0])
    write_tables(folder, tables, file_format)


def write_csv(runs: Sequence[Run], folder: Path, metrics: Sequence[str]) -> None:
    """Write a CSV file for each table of a run, or one with a row for each run of a sweep."""
    _write_tables(runs, folder, metrics, "csv")


def write_parquet(runs: Sequence[Run], folder: Path, metrics: Sequence[str]) -> None:
    """Write the tables of `write_csv` as Parquet. Raises `InputError` without pandas and pyarrow."""
    try:
        _write_tables(runs, folder, metrics, "parquet")
    except ImportError as error:
        raise InputError(f"--parquet: {error}") from None


def write_perfetto(runs: Sequence[Run], folder: Path, metrics: Sequence[str]) -> None:
    """Write the timeline of a run for ui.perfetto.dev; raises `InputError` for a sweep."""
    if len(runs) > 1:
        raise InputError(
            f"{runs[0].path.parent}: has {len(runs)} runs, and --perfetto exports a single run: name one of them"
        )
    _refuse_metrics(metrics)
    run = runs[0]
    # Computed again rather than copied from the results, since an interrupted run lacks the file.
    with (folder / "trace.json").open("w", encoding="utf-8") as file:
        perfetto.write(file, run.outcome.events, run.end, run.trial.scenario.name)


def write_plots(runs: Sequence[Run], folder: Path, metrics: Sequence[str]) -> None:
    """Write the plots of a run or a sweep as SVG and PDF."""
    require_extra("matplotlib", "plots", "--plots")
    from testbed_controller.report import html, sweep
    from testbed_controller.report.drawing import save_all

    if len(runs) == 1:
        _refuse_metrics(metrics)
        save_all(folder, html.charts(runs[0]))
        return
    summary = summary_of(runs)
    headings = sweep.choose_metrics(summary, metrics) if metrics else None
    save_all(folder, sweep.charts(summary, runs, headings))


def write_latex(runs: Sequence[Run], folder: Path, metrics: Sequence[str]) -> None:
    """Write the table of a sweep for LaTeX with the package booktabs; raises `InputError` for a single run."""
    if len(runs) == 1:
        raise InputError(
            f"{runs[0].path}: is a single run, and --latex exports a sweep"
        )
    from testbed_controller.report import sweep, tables

    summary = summary_of(runs)
    headings = sweep.choose_metrics(summary, metrics) if metrics else None
    text = tables.latex(sweep.section(summary, headings))
    (folder / "points.tex").write_text(text, encoding="utf-8")
