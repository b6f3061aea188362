"""`testbed export`: the results of runs as files for other programs, and a scenario as a Docker Compose project.

`testbed export run` writes with one of the formats of `testbed_controller.results.exporters`; the options `--csv` to
`--latex` are short forms of `--format NAME`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import click

from testbed.common.errors import HostError, InputError
from testbed_controller.cli.options import CommandGroup, overrides_option
from testbed_controller.cli.printing import say


class _ExportGroup(CommandGroup):
    """A command group in which `export DIR` is short for `export run DIR`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in ("-h", "--help", *self.commands):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ExportGroup)
def export() -> None:
    """Export the tables of a run, or a scenario as a Docker Compose project. `export DIR` is `export run DIR`."""


@export.command()
@click.argument("folder", metavar="RESULTS_DIR", type=click.Path(path_type=Path))
@click.option(
    "--csv",
    "format_name",
    flag_value="csv",
    help="A file for each table.  [default]",
    default="csv",
)
@click.option(
    "--parquet",
    "format_name",
    flag_value="parquet",
    help="The same tables as Parquet; needs pandas and pyarrow.",
)
@click.option(
    "--perfetto",
    "format_name",
    flag_value="perfetto",
    help="The timeline as a trace for ui.perfetto.dev.",
)
@click.option(
    "--plots",
    "format_name",
    flag_value="plots",
    help="The plots as SVG and PDF, for one and two columns.",
)
@click.option(
    "--latex",
    "format_name",
    flag_value="latex",
    help="The table of a sweep in LaTeX, with the package booktabs.",
)
@click.option(
    "--format",
    "format_name",
    metavar="NAME",
    help="A format added by an installed package; see docs/extending.md.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME[: HEADING]",
    help="With --plots or --latex of a sweep: export this metric, under this heading. May be repeated.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Destination.  [default: RESULTS_DIR/export]",
)
def run(
    folder: Path, format_name: str, metrics: tuple[str, ...], out: Path | None
) -> None:
    """Write the tables of a run (metrics, events, devices, ...) for other programs, or the plots for a paper.

    RESULTS_DIR is a folder written by `testbed run`. For a sweep, a single table with a row for each run is written.
    The output lists the written files.

    \b
    Examples:
      testbed export results/quickstart --csv
      testbed export results/quickstart --perfetto --out /tmp/quickstart
      testbed export results/sweep --plots
      testbed export results/sweep --latex --metric accuracy --metric 'round_time: Time per round'
    """
    from testbed_controller.results.exporters import find_writer
    from testbed_controller.results.files import load, load_metrics, run_folders

    write = find_writer(format_name)
    folders = run_folders(folder)
    # Only the metrics of a sweep: the events of all its runs may exceed the memory.
    load_run = load_metrics if len(folders) > 1 else load
    runs = list(map(load_run, folders))
    destination = out or folder / "export"
    try:
        destination.mkdir(parents=True, exist_ok=True)
        times_before = _modification_times(destination)
        write(runs, destination, metrics)
    except InputError:
        # Removes a folder that was just created; fails for a folder with files of an earlier export, which stays.
        with suppress(OSError):
            destination.rmdir()
        raise
    except OSError as error:
        raise _write_error(destination, error) from None
    written = []
    for name, time in _modification_times(destination).items():
        if times_before.get(name) != time:
            written.append(name)
    _print_files(destination, written)


def _modification_times(folder: Path) -> dict[str, int]:
    """Return the time of each file's last modification in nanoseconds, by name."""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def _write_error(path: Path, error: OSError) -> HostError:
    return HostError(f"{path}: cannot be written: {error.strerror or error}")


def _print_files(folder: Path, names: Iterable[str]) -> None:
    click.echo(f"written to {folder}: {', '.join(sorted(names))}")


@export.command()
@click.argument("scenario")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Destination.  [default: compose-<scenario>]",
)
@overrides_option
def compose(scenario: str, out: Path | None, overrides: tuple[str, ...]) -> None:
    """Write a Docker Compose project with the devices, links and hardening of SCENARIO.

    For a sweep, the first point is used. The project needs the images and a token, and its links must be set up after
    each start; comments in its docker-compose.yml explain how.

    \b
    Examples:
      testbed export compose quickstart --out my-lab
    """
    from testbed.methods.program.workload import programs_of
    from testbed.scenario.expand import trials
    from testbed.scenario.loading import load
    from testbed_controller.lab.composing import compose_project
    from testbed_controller.lab.engine import ensure_engine
    from testbed_controller.lab.images import ensure_images
    from testbed_controller.lab.programimages import device_images

    trial = trials(load(scenario, overrides))[0]
    workload = trial.scenario.workload
    programs = programs_of(
        workload, [device.name for device in trial.experiment.devices]
    )
    images: dict[str, str] = {}
    # Programs may need images of their own, which are built now, as their names depend on their content.
    if any(part.image or part.packages for part in programs.values()):
        client = ensure_engine(say)
        testbed_images = ensure_images(client, say)
        tags = device_images(client, workload, trial.experiment, testbed_images, say)
        # The testbed's own image is a variable of the project, which `testbed setup images --env` sets.
        for name, tag in tags.items():
            if tag != testbed_images.device:
                images[name] = tag
    destination = out or Path(f"compose-{trial.scenario.name}")
    files = compose_project(trial, images)
    try:
        destination.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (destination / name).write_text(text)
        # A script, which the comments in docker-compose.yml ask to run.
        (destination / "shape").chmod(0o755)
    except OSError as error:
        raise _write_error(destination, error) from None
    _print_files(destination, files)
