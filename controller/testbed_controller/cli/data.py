"""`testbed show data` and `testbed setup data`: list, display and download data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from yaml import YAMLError

from testbed.common import yamltext
from testbed.common.errors import InputError
from testbed.scenario.loading import parse
from testbed_controller.cli.options import json_option
from testbed_controller.cli.printing import dump, make_console, print_section
from testbed_controller.report.tables import Column

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from testbed.ml.data.dataset import Dataset
    from testbed.ml.workload import DataPart

_SHADES = " .:-=+*#%@"
"""Characters for ten levels of brightness, from black to white."""


@click.command()
@click.argument("name", required=False)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder with the files of NAME.",
)
@click.option(
    "--path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Picture file of the data set `image`.",
)
@click.option(
    "--count",
    default=3,
    show_default=True,
    type=click.IntRange(0, 20),
    help="Number of samples to show.",
)
@click.option(
    "--split",
    help="Also show the samples of each device under a split: iid, dirichlet=0.3, shards=2, quantity=0.5, column=NAME.",
)
@click.option(
    "--devices",
    default=4,
    show_default=True,
    type=click.IntRange(1, 100),
    help="Number of devices that share the data.",
)
@json_option
def data(
    name: str | None,
    folder: Path | None,
    path: Path | None,
    count: int,
    split: str | None,
    devices: int,
    as_json: bool,
) -> None:
    """List the data sets available to scenarios, and whether their files are present. With NAME, show samples of one.

    NAME is a name from the list, or data of your own: a file or folder, FILE.py:FUNCTION, or TABLE:LABEL, a table and
    its column of labels. The output has the sizes, samples per class, the first training samples, and with --split the
    samples of each device.

    `digits` and `photos` come with scikit-learn, `synthetic-CxHxW` is generated, and `image` is a picture of your own.
    All others are read from files in data/<name>, which only `testbed setup data` downloads.

    \b
    Examples:
      testbed show data
      testbed show data digits --split dirichlet=0.3
      testbed show data mnist --folder ../images --count 1
      testbed show data my_data.py:load
      testbed show data sales.csv:price --split column=shop --devices 3

    \b
    Example, in a scenario:
      workload:
        data: {name: mnist, train: 6000}
    """
    if name is None:
        # Options about one data set would have no effect on the list of all.
        for option, value in (
            ("--split", split),
            ("--folder", folder),
            ("--path", path),
        ):
            if value is not None:
                raise InputError(f"{option}: name the data set as well")
        _list_sets(as_json)
        return
    part = _part_of(name, path, split)
    dataset = _read_dataset(part, path or folder)
    facts = _dataset_facts(dataset)
    if split is not None:
        facts["shares"] = _device_shares(dataset, part, devices)
    if as_json:
        dump(facts)
    else:
        _print_facts(dataset, facts)
        _print_samples(dataset, count, "class" if "per_class" in facts else "label")


def _part_of(name: str, path: Path | None, split: str | None) -> DataPart:
    """Return the section ``workload.data`` of a scenario for a data set and split, as written by users."""
    from testbed.ml.data import catalog
    from testbed.ml.workload import DataPart

    part = catalog.part_of(name)
    is_picture = not catalog.is_own(part) and catalog.describe(part.name).from_path
    if is_picture and path is None:
        raise InputError(f"{name} is a picture of your own: name its file with --path")
    if split is None:
        return part
    kind, _, value = split.partition("=")
    # A scenario has a word for `iid`, and a mapping for `dirichlet=0.3`.
    split_section: Any = kind
    if value:
        split_section = {kind: _parse_value(value)}
    section = part.model_dump(exclude_defaults=True)
    try:
        return parse(DataPart, {**section, "split": split_section})
    except InputError as error:
        raise InputError(f"--split {split}: {error}") from None


def _parse_value(text: str) -> Any:
    """Parse a value as in a scenario: ``3`` is a number, and ``shop`` a text."""
    try:
        return yamltext.values(text)
    except YAMLError:
        return text


def _read_dataset(part: DataPart, path: Path | None) -> Dataset:
    from testbed.ml.data import catalog
    from testbed.ml.data.catalog import data_place

    if catalog.is_own(part):
        return catalog.load(part, Path(part.path or part.file or ""))
    return catalog.load(part, path or data_place(part.name))


def _dataset_facts(dataset: Dataset) -> dict[str, Any]:
    from testbed.ml.data.split import is_class

    train, test = dataset.train_labels, dataset.test_labels
    facts: dict[str, Any] = {
        "name": dataset.name,
        "shape": list(dataset.shape),
        "classes": dataset.classes,
        "samples": {"train": len(train), "test": len(test)},
    }
    # Labels that are not classes, such as prices or rows of labels, cannot be counted.
    if dataset.classes and is_class(train):
        facts["per_class"] = {
            "train": _count_labels(train, dataset.classes),
            "test": _count_labels(test, dataset.classes),
        }
    return facts


def _list_sets(as_json: bool) -> None:
    from testbed.ml.data.catalog import list_names

    rows = [_describe_dataset(name) for name in list_names()]
    if as_json:
        dump(rows)
        return
    cells = []
    for row in rows:
        shape = _format_shape(row["shape"]) or "-"
        classes = str(row["classes"] or "-")
        cells.append((row["name"], shape, classes, _files_note(row), row["summary"]))
    titles = ("name", "image", "classes", "files", "description")
    columns = [Column(title) for title in titles]
    print_section(make_console(), columns, cells)


def _files_note(row: Mapping[str, Any]) -> str:
    if row["from_path"]:
        return "named by --path"
    if row["folder"] is None:
        return "none needed"
    return row["folder"] if row["complete"] else "missing"


def _describe_dataset(name: str) -> dict[str, Any]:
    from testbed.ml.data.catalog import DataSource, data_place, describe
    from testbed.ml.data.files import find

    try:
        source = describe(name)
    except InputError as error:
        # A broken package must not hide the data sets of other packages: its entry has the error as its summary.
        source = DataSource(name, error.text, (), 0)
    folder = data_place(source.name)
    return {
        "name": source.name,
        "summary": source.summary,
        "shape": list(source.shape),
        "classes": source.classes,
        "folder": str(folder) if source.files else None,
        "from_path": source.from_path,
        "complete": all(find(folder, file) is not None for file in source.files),
    }


@click.command("data")
@click.argument("name")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Destination.  [default: data/NAME]",
)
@click.option(
    "--from",
    "bases",
    multiple=True,
    metavar="URL",
    help="Folder to try before the published addresses, such as a mirror. May be repeated.",
)
def fetch(name: str, folder: Path | None, bases: tuple[str, ...]) -> None:
    """Download the files of a data set and verify their published checksums.

    Files that exist are kept. On a machine without internet access, copy the files into data/NAME by hand, or name a
    mirror with --from.

    \b
    Examples:
      testbed setup data mnist
      testbed setup data cifar10 --folder /srv/cifar10
      testbed setup data mnist --from http://mirror.example/mnist
    """
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TransferSpeedColumn,
    )

    from testbed.ml.data.catalog import DATA_FOLDER
    from testbed.ml.data.fetch import fetch as download

    console = make_console(stderr=True)
    destination = folder or DATA_FOLDER / name
    with Progress(
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
    ) as bars:
        bar_of: dict[str, TaskID] = {}

        def show_progress(file: str, done: int, total: int | None) -> None:
            if file not in bar_of:
                bar_of[file] = bars.add_task(file, total=total)
            bars.update(bar_of[file], completed=done, total=total)

        files = download(name, destination, bases, show_progress)
    click.echo(f"{name}: {len(files)} files in {destination}")


def _count_labels(labels: npt.NDArray[Any], classes: int) -> list[int]:
    import numpy as np

    counts: list[int] = np.bincount(labels, minlength=classes).tolist()
    return counts


def _device_shares(dataset: Dataset, part: DataPart, devices: int) -> dict[str, Any]:
    """Return the number of samples of each device under a split; by class, if the data set has classes."""
    from testbed.ml.data.split import is_class, split_samples

    if part.split == "coordinator":
        raise InputError(
            "--split coordinator leaves all samples on one device: name another split"
        )
    owners = [f"device{number}" for number in range(1, devices + 1)]
    labels = dataset.train_labels
    # Any seed shows the sizes of the shares; in a run, the seed of the scenario draws the samples.
    seed = 0
    shares = split_samples(
        labels, dataset.classes, owners, part.split, seed, dataset.groups
    )
    counts: dict[str, Any] = {}
    for name, indices in shares.items():
        if is_class(labels):
            counts[name] = _count_labels(labels[indices], dataset.classes)
        else:
            counts[name] = len(indices)
    return counts


def _print_facts(dataset: Dataset, facts: Mapping[str, Any]) -> None:
    kind = "images" if len(dataset.shape) == 3 else "samples"
    samples_of_size = f"{kind} of {_sample_size(dataset)}"
    if not dataset.classes:
        count = len(dataset.test_labels)
        click.echo(f"{dataset.name}: {count} {samples_of_size}, without labels")
        return
    per_class = facts.get("per_class", {})
    labels = f"labels {dataset.train_labels.shape[1:] or 'of numbers'}"
    if per_class:
        labels = f"{dataset.classes} classes"
    click.echo(f"{dataset.name}: {samples_of_size}, {labels}")
    for subset, samples in facts["samples"].items():
        line = f"  {subset}: {samples:,} samples"
        if counts := per_class.get(subset):
            line += f", {min(counts):,} to {max(counts):,} per class"
        click.echo(line)
    for name, share in facts.get("shares", {}).items():
        click.echo(f"  {name}: {_format_share(share)}")


def _sample_size(dataset: Dataset) -> str:
    if not dataset.fields:
        return _format_shape(dataset.shape)
    sizes = []
    for each in dataset.fields:
        sizes.append(f"{each.name} {_format_shape(each.shape) or 1}")
    return " and ".join(sizes)


def _format_share(share: int | list[int]) -> str:
    """Format the samples of a device: their number, or one number for each class."""
    if isinstance(share, int):
        return f"{share:,}"
    return f"{sum(share):,}, by class {', '.join(map(str, share))}"


def _format_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _print_samples(dataset: Dataset, count: int, label: str) -> None:
    """Print the first training samples: pictures as characters, other samples as their first values."""
    is_picture = len(dataset.shape) == 3 and dataset.shape[0] in (1, 3)
    samples = dataset.train_images[:count]
    for sample, value in zip(samples, dataset.train_labels[:count], strict=True):
        click.echo(f"\n{label} {value}")
        if is_picture:
            click.echo(_draw_image(sample))
        else:
            click.echo("  " + " ".join(f"{each:g}" for each in sample.ravel()[:20]))


def _draw_image(image: npt.NDArray[np.float32]) -> str:
    """Draw an image of (channels, height, width) in [0, 1] as text."""
    grey = image.mean(axis=0)
    levels = (grey * (len(_SHADES) - 1)).round().astype(int)
    lines = []
    for row in levels:
        # A character of a terminal is about twice as high as wide.
        pixels = "".join(_SHADES[level] * 2 for level in row)
        lines.append("  " + pixels.rstrip())
    return "\n".join(lines)
