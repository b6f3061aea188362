"""`testbed export`: a run's tables and timeline for other programs."""

from __future__ import annotations

import shutil
from pathlib import Path

import click


@click.command()
@click.argument("folder", metavar="RESULTS_DIR", type=click.Path(path_type=Path))
@click.option("--csv", "kind", flag_value="csv", help="A file for each table.  [default]", default="csv")
@click.option("--parquet", "kind", flag_value="parquet", help="The same for pandas and others; needs pandas, pyarrow.")
@click.option("--perfetto", "kind", flag_value="perfetto", help="The timeline, for ui.perfetto.dev.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder.  [default: RESULTS_DIR/export]")
def export(folder: Path, kind: str, out: Path | None) -> None:
    """Write the tables of a run (figures, events, devices, links, steps, ...) for other programs.

    RESULTS_DIR is what `testbed run` wrote; of a sweep, one table is written with a row for each run.

    \b
    Examples:
      testbed export results/quickstart --csv
      testbed export results/quickstart --perfetto --out /tmp/quickstart
    """
    from controller.results.files import load_all
    from controller.results.rows import TABLES, points, rows, write_csv, write_parquet
    from testbed.errors import HostError, InputError

    runs = load_all(folder)
    several = len(runs) > 1
    if several and kind == "perfetto":
        raise InputError(f"{folder}: holds {len(runs)} runs: name one of them")
    place = out or folder / "export"
    tables = {"points": points(runs)} if several else {name: rows(runs[0], name) for name in TABLES}
    try:
        place.mkdir(parents=True, exist_ok=True)
        if kind == "perfetto":
            shutil.copy(folder / "trace.json", place / "trace.json")
        for name, found in tables.items():
            if kind == "csv" and found:
                write_csv(place / f"{name}.csv", found)
            elif kind == "parquet" and found:
                write_parquet(place / f"{name}.parquet", found)
    except ImportError as error:
        raise InputError(f"--parquet: {error}") from None
    except OSError as error:
        raise HostError(f"{place}: cannot be written: {error.strerror or error}") from None
    click.echo(f"{place}: {', '.join(sorted(each.name for each in place.iterdir()))}")
