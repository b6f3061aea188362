"""`testbed export`: a run's tables and timeline for other programs; a scenario as a docker compose project."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click

from testbed.common.errors import HostError, InputError
from testbed_controller.cli.options import CommandGroup, overrides_option
from testbed_controller.cli.printing import say


class _OfRuns(CommandGroup):
    """Command group that treats an unknown export kind as the name of a run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in ("-h", "--help", *self.commands):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_OfRuns)
def export() -> None:
    """Export the tables of a run, or a scenario as a Docker Compose project. `export DIR` is `export run DIR`."""


@export.command()
@click.argument("folder", metavar="RESULTS_DIR", type=click.Path(path_type=Path))
@click.option(
    "--csv",
    "kind",
    flag_value="csv",
    help="A file for each table.  [default]",
    default="csv",
)
@click.option(
    "--parquet",
    "kind",
    flag_value="parquet",
    help="The same tables as Parquet; needs pandas and pyarrow.",
)
@click.option(
    "--perfetto",
    "kind",
    flag_value="perfetto",
    help="The timeline as a trace for ui.perfetto.dev.",
)
@click.option(
    "--plots",
    "kind",
    flag_value="plots",
    help="The plots as SVG and PDF, for one and two columns.",
)
@click.option(
    "--latex",
    "kind",
    flag_value="latex",
    help="The table of a sweep in LaTeX, with the package booktabs.",
)
@click.option(
    "--format",
    "kind",
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
def run(folder: Path, kind: str, metrics: tuple[str, ...], out: Path | None) -> None:
    """Write the tables of a run (metrics, events, devices, ...) for other programs, or its plots for a paper.

    RESULTS_DIR is a folder written by `testbed run`. For a sweep, a single table with a row for each run is written.

    \b
    Examples:
      testbed export results/quickstart --csv
      testbed export results/quickstart --perfetto --out /tmp/quickstart
      testbed export results/sweep --plots
      testbed export results/sweep --latex --metric accuracy --metric 'round_time: Time per round'
    """
    from testbed_controller.results.exporters import find_writer
    from testbed_controller.results.files import load, load_metrics, run_folders

    write = find_writer(kind)
    folders = run_folders(folder)
    # Only the metrics of a sweep: the events of all its runs may exceed the memory.
    load_run = load_metrics if len(folders) > 1 else load
    runs = list(map(load_run, folders))
    place = out or folder / "export"
    try:
        place.mkdir(parents=True, exist_ok=True)
        write(runs, place, metrics)
    except InputError:
        # Removes a folder just created; raises for one with content.
        with suppress(OSError):
            place.rmdir()
        raise
    except OSError as error:
        raise _write_error(place, error) from None
    _print_content(place)


def _write_error(path: Path, error: OSError) -> HostError:
    return HostError(f"{path}: cannot be written: {error.strerror or error}")


def _print_content(path: Path) -> None:
    names = sorted(each.name for each in path.iterdir())
    click.echo(f"{path}: {', '.join(names)}")


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
    # Programs may bring images of their own, which are built now, as their names depend on their content.
    if any(part.image or part.packages for part in programs.values()):
        client = ensure_engine(say)
        ours = ensure_images(client, say)
        tags = device_images(client, workload, trial.experiment, ours, say)
        # The testbed's own image is a variable of the project, which `testbed setup images --env` sets.
        for name, tag in tags.items():
            if tag != ours.device:
                images[name] = tag
    place = out or Path(f"compose-{trial.scenario.name}")
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name, text in compose_project(trial, images).items():
            (place / name).write_text(text)
        (place / "shape").chmod(0o755)
    except OSError as error:
        raise _write_error(place, error) from None
    _print_content(place)
