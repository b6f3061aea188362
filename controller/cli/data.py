"""`testbed data`: which data sets there are, which are at hand, and the one command that downloads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from controller.cli.options import CommandGroup, as_json
from controller.cli.printing import dump, make_console, print_section

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from testbed.data.catalog import DataSource

_SHADES = " .:-=+*#%@"
"""Ten levels from black to white."""


def _place(name: str, folder: Path | None) -> Path:
    from testbed.scenario.files import DATA_FOLDER

    return folder or DATA_FOLDER / name


@click.group(cls=CommandGroup)
def data() -> None:
    """List, download and look at data sets.

    `digits` and `photos` come with scikit-learn, `synthetic-CxHxW` is made up on the spot, `image` is a file of yours;
    the others are read from files.
    Nothing but `testbed data fetch` ever downloads them, into data/<name>, where runs look for them.
    """


@data.command(name="list")
@as_json
def list_(as_json: bool) -> None:
    """List the data sets a scenario can name, and whether their files are at hand.

    \b
    Example, in a scenario:
      workload:
        data: {name: mnist, train: 6000}
    """
    from testbed.data.catalog import DATASETS

    rows = [_describe(source) for source in DATASETS.values()]
    if as_json:
        dump(rows)
        return
    from controller.report.tables import Column

    shown = []
    for row in rows:
        needed = "its path" if row["from_path"] else "none needed"
        files = needed if row["folder"] is None else row["folder"] if row["complete"] else "not here"
        shown.append((row["name"], "x".join(map(str, row["shape"])), str(row["classes"] or "-"), files, row["summary"]))
    columns = [Column(head) for head in ("name", "image", "classes", "files", "what it is")]
    print_section(make_console(), columns, shown)


def _describe(source: DataSource) -> dict[str, Any]:
    from testbed.data.files import find

    folder = _place(source.name, None)
    return {
        "name": source.name,
        "summary": source.summary,
        "shape": list(source.shape),
        "classes": source.classes,
        "folder": str(folder) if source.files else None,
        "from_path": source.from_path,
        "complete": all(find(folder, file) is not None for file in source.files),
    }


@data.command()
@click.argument("name")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Where to.  [default: data/NAME]")
@click.option("--from", "bases", multiple=True, metavar="URL", help="A folder to try first, such as a mirror.")
def fetch(name: str, folder: Path | None, bases: tuple[str, ...]) -> None:
    """Download the files of a data set, each checked against its published checksum.

    Files that are there already are left alone. Where a machine has no way to the internet, copy the files into
    data/NAME by hand, or name a mirror.

    \b
    Examples:
      testbed data fetch mnist
      testbed data fetch cifar10 --folder /srv/cifar10
      testbed data fetch mnist --from http://mirror.example/mnist
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TransferSpeedColumn

    from testbed.data.fetch import fetch as download

    console = make_console(stderr=True)
    place = _place(name, folder)
    with Progress("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console) as bars:
        shown: dict[str, TaskID] = {}

        def show(file: str, done: int, total: int | None) -> None:
            if file not in shown:
                shown[file] = bars.add_task(file, total=total)
            bars.update(shown[file], completed=done, total=total)

        files = download(name, place, bases, show)
    click.echo(f"{name}: {len(files)} files in {place}")


@data.command()
@click.argument("name")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Where its files lie.")
@click.option("--path", type=click.Path(path_type=Path, dir_okay=False), help="For image: the picture's file.")
@click.option("--count", default=3, show_default=True, type=click.IntRange(0, 20), help="Images to draw.")
@as_json
def show(name: str, folder: Path | None, path: Path | None, count: int, as_json: bool) -> None:
    """Show what is in a data set: its sizes, samples per class, and its first images to learn from, if any.

    \b
    Examples:
      testbed data show digits
      testbed data show mnist --folder ../images --count 1
    """
    import numpy as np

    from testbed.common.errors import InputError
    from testbed.data import describe, load
    from testbed.workload import DataPart

    if describe(name).from_path and path is None:
        raise InputError(f"{name} is a picture of your own: name its file with --path")
    dataset = load(DataPart(name=name), path or _place(name, folder))
    parts = {"train": dataset.train_labels, "test": dataset.test_labels}
    per_class = {part: np.bincount(labels, minlength=dataset.classes).tolist() for part, labels in parts.items()}
    if as_json:
        samples = {part: len(labels) for part, labels in parts.items()}
        facts = {"name": dataset.name, "shape": list(dataset.shape), "classes": dataset.classes, "samples": samples}
        dump({**facts, "per_class": per_class})
        return
    size = "x".join(map(str, dataset.shape))
    if not dataset.classes:
        click.echo(f"{dataset.name}: {len(dataset.test_labels)} images of {size}, without labels")
        return
    click.echo(f"{dataset.name}: images of {size}, {dataset.classes} classes")
    for part, labels in parts.items():
        counts = per_class[part]
        click.echo(f"  {part}: {len(labels):,} samples, {min(counts):,} to {max(counts):,} of a class")
    for image, label in zip(dataset.train_images[:count], dataset.train_labels[:count], strict=True):
        click.echo(f"\nclass {label}")
        click.echo(_draw(image))


def _draw(image: npt.NDArray[np.float32]) -> str:
    """Draw (channels, height, width) in [0, 1] with characters, two for a pixel as they are twice as high as wide."""
    grey = image.mean(axis=0)
    levels = (grey * (len(_SHADES) - 1)).round().astype(int)
    return "\n".join("  " + "".join(_SHADES[level] * 2 for level in row).rstrip() for row in levels)
