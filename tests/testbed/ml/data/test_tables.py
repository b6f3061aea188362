"""Tables as data: columns and their types, malformed rows, large files, and splits by column."""

from __future__ import annotations

import importlib.util
import json
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from testbed.common.errors import InputError
from testbed.ml.data import large, load, tables
from testbed.ml.data.dataset import Dataset
from testbed.ml.data.split import split_samples
from testbed.ml.data.tables import Table
from testbed.ml.data.tables import read as read_table
from testbed.ml.preparation import shares_of
from testbed.ml.workload import DataPart, SplitPart
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load as load_scenario
from testbed.simulation import simulate
from testbed_controller.cli.main import testbed as command

SIZES = range(5, 45)
ROWS = []
for shop in ("a", "b", "c"):
    for size in SIZES:
        price = "dear" if size > 20 else "cheap"
        ROWS.append(f"{shop},{size},{size % 3}.5,{price}")
needs_pyarrow = pytest.mark.skipif(
    not importlib.util.find_spec("pyarrow"), reason="needs pyarrow: the extra `frames`"
)


def write_sales(folder: Path, rows: Sequence[str] = ROWS) -> Path:
    file = folder / "sales.csv"
    file.write_text("\n".join(["shop,size,rooms,price", *rows]) + "\n")
    return file


def load_sales(file: Path, **keys: object) -> Dataset:
    part = DataPart.model_validate({"path": str(file), "label": "price", **keys})
    return load(part, file)


def read_text(
    folder: Path,
    text: str,
    label: str | None = "price",
    columns: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    group: str | None = None,
) -> Table:
    file = folder / "own.csv"
    file.write_text(text)
    return read_table(file, label, columns, group)


# -------------------------------------------------------------------------------------------------------------- columns


def test_texts_as_labels_become_classes(tmp_path: Path) -> None:
    data = load_sales(write_sales(tmp_path), columns=["size", "rooms"])
    assert data.shape == (2,)
    assert data.classes == 2
    assert len(data.train_labels) + len(data.test_labels) == len(ROWS)
    assert data.train_images.dtype == np.float32
    # Classes have the order of the alphabet: cheap, dear.
    is_dear = data.train_images[:, 0] > 20
    assert np.array_equal(data.train_labels == 1, is_dear)


def test_numbers_as_labels_stay_numbers(tmp_path: Path) -> None:
    file = write_sales(tmp_path)
    data = load_sales(file, label="rooms", columns=["shop", "size"])
    assert data.train_labels.dtype == np.float32
    # Shops are numbered, so that both inputs are integers.
    assert data.integers


def test_texts_become_integers_in_alphabetical_order(tmp_path: Path) -> None:
    text = "town,size,rooms,sold,price\nx,5,1.5,True,3\na,7,2,False,0\n"
    table = read_text(tmp_path, text, columns=["town", "size", "sold"])
    assert table.samples.tolist() == [[1, 5, 1], [0, 7, 0]]
    assert table.samples.dtype == np.int64
    assert table.labels.tolist() == [3, 0]


def test_one_column_of_fractions_makes_all_columns_floats(tmp_path: Path) -> None:
    text = "town,size,rooms,sold,price\nx,5,1.5,True,3\na,7,2,False,0\n"
    table = read_text(tmp_path, text)
    assert table.samples.dtype == np.float32
    assert table.samples.tolist() == [[1, 5, 1.5, 1], [0, 7, 2, 0]]
    assert table.groups is None


def test_split_column_is_input_only_if_named(tmp_path: Path) -> None:
    text = "town,size,price\nx,5,1\na,7,0\nx,8,0\n"
    table = read_text(tmp_path, text, group="town")
    assert table.samples.tolist() == [[5], [7], [8]]
    assert table.groups.tolist() == [1, 0, 1]
    both = read_text(tmp_path, text, columns=["town", "size"], group="town")
    assert both.samples.shape == (3, 2)


def test_groups_of_columns_become_inputs_with_separate_types(
    tmp_path: Path,
) -> None:
    text = "town,size,rooms,price\nx,5,1.5,1\na,7,2,0\n"
    columns = {"place": ["town"], "body": ["size", "rooms"]}
    samples = read_text(tmp_path, text, columns=columns).samples
    assert list(samples) == ["place", "body"]
    assert samples["place"].tolist() == [[1], [0]]
    assert samples["place"].dtype == np.int64
    assert samples["body"].tolist() == [[5, 1.5], [7, 2]]
    assert samples["body"].dtype == np.float32


def test_blanks_and_byte_order_mark_of_column_names_are_ignored(
    tmp_path: Path,
) -> None:
    # Spreadsheets write a byte order mark at the beginning of CSV files.
    table = read_text(tmp_path, "\ufeffsize, price\n5,1\n\n7,0\n")
    assert table.samples.tolist() == [[5], [7]]


# ------------------------------------------------------------------------------------------------------ rejected tables


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        (
            ROWS,
            {"label": "cost"},
            "no column 'cost': available are shop, size, rooms, price",
        ),
        (ROWS, {"columns": ["width"]}, "data.columns: .* no column 'width'"),
        (["a,1,2,cheap", "b,,2,dear"], {}, "column 'size' is empty in row 2"),
        (
            ["a,1,2,cheap", "b,2,dear"],
            {},
            r"sales.csv:3: has 3 cells, the first line 4",
        ),
        (
            ["", "a,1,2,cheap", "", "b,2,dear"],
            {},
            r"sales.csv:5: has 3 cells, the first line 4",
        ),
        ([], {}, "has no rows"),
    ],
    ids=[
        "unknown-label",
        "unknown-column",
        "empty-cell",
        "missing-cell",
        "missing-cell-after-empty-lines",
        "no-rows",
    ],
)
def test_malformed_table_is_rejected_with_row(
    tmp_path: Path, rows: list[str], keys: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_sales(write_sales(tmp_path, rows), **keys)


@pytest.mark.parametrize("cell", ["", " ", "nan", "NaN", "NAN", "None", "-nan"])
def test_empty_cell_is_rejected_in_any_notation(tmp_path: Path, cell: str) -> None:
    with pytest.raises(InputError, match="column 'size' is empty in row 2"):
        read_text(tmp_path, f"size,price\n5,1\n{cell},0\n")


def test_columns_with_equal_names_are_rejected(tmp_path: Path) -> None:
    message = r"own\.csv: has two columns 'size': rename one"
    with pytest.raises(InputError, match=message):
        read_text(tmp_path, "size,size,price\n5,6,1\n7,8,0\n")


def test_table_without_label_lists_its_columns(tmp_path: Path) -> None:
    message = "has the columns size, price: name the one of the labels"
    with pytest.raises(InputError, match=message):
        read_text(tmp_path, "size,price\n5,1\n", label=None)


def test_table_with_labels_only_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="a sample needs at least one column besides the label"
    ):
        read_text(tmp_path, "price\n1\n")


def test_images_with_colours_last_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "last.npz"
    np.savez(file, x_train=np.zeros((4, 16, 16, 3)), y_train=np.arange(4) % 2)
    message = r"colours last: move .* numpy.moveaxis\(samples, -1, 1\)"
    with pytest.raises(InputError, match=message):
        load(DataPart(path=str(file)), file)


# -------------------------------------------------------------------------------------------------------------- Parquet


@pytest.mark.skipif(bool(importlib.util.find_spec("pyarrow")), reason="pyarrow is here")
def test_parquet_without_pyarrow_names_extra(tmp_path: Path) -> None:
    file = tmp_path / "sales.parquet"
    file.write_bytes(b"")
    with pytest.raises(InputError, match=r"pip install 'edge-testbed\[frames\]'"):
        load_sales(file)


@needs_pyarrow
def test_parquet_file_equals_csv_file(tmp_path: Path) -> None:
    from pyarrow import csv, parquet

    file = write_sales(tmp_path)
    parquet.write_table(csv.read_csv(file), tmp_path / "sales.parquet")
    from_csv = load_sales(file)
    from_parquet = load_sales(tmp_path / "sales.parquet")
    assert np.array_equal(from_csv.train_images, from_parquet.train_images)
    assert np.array_equal(from_csv.train_labels, from_parquet.train_labels)


@needs_pyarrow
def test_parquet_columns_with_equal_names_are_rejected(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    file = tmp_path / "own.parquet"
    columns = pyarrow.table([[1], [2], [3]], names=["size", "size", "price"])
    parquet.write_table(columns, file)
    with pytest.raises(InputError, match=r"own\.parquet: has two columns 'size'"):
        read_table(file, "price", None, None)


# --------------------------------------------------------------------------------------------------------- large tables


def long_rows() -> list[str]:
    """Return 1000 rows in which sizes have fractions after row 900 only."""
    rows = []
    for row in range(1000):
        size = row / 2 if row > 900 else row
        price = "dear" if row % 3 else "cheap"
        rows.append(f"shop{row % 7},{row},{size},{price}")
    return rows


def test_table_read_in_blocks_equals_table_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_sales(tmp_path, long_rows())
    keys = {"split": {"column": "shop"}, "columns": ["shop", "size", "rooms"]}
    in_memory = load_sales(file, **keys)
    # The type of a column follows from all blocks: fractions are in the last ones.
    monkeypatch.setattr(tables, "ROWS", 64)
    monkeypatch.setattr(large, "MAX_IN_MEMORY", 1000)
    # Written again, since data of an unchanged file are cached.
    in_file = load_sales(write_sales(tmp_path, long_rows()), **keys)
    assert isinstance(in_file.train_images, np.memmap)
    for name in (
        "train_images",
        "train_labels",
        "test_images",
        "test_labels",
        "groups",
    ):
        expected = getattr(in_memory, name)
        assert np.array_equal(getattr(in_file, name), expected), name
    assert in_memory.train_images.dtype == np.float32
    assert in_file.train_images.dtype == np.float32


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("shop1,,2,dear", "column 'size' is empty in row 501"),
        # The first line holds the names.
        ("shop1,2", r"sales.csv:502: has 2 cells"),
    ],
    ids=["empty-cell", "missing-cells"],
)
def test_errors_in_later_blocks_name_row_of_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, message: str
) -> None:
    monkeypatch.setattr(tables, "ROWS", 64)
    monkeypatch.setattr(large, "MAX_IN_MEMORY", 1000)
    file = write_sales(tmp_path, [*long_rows()[:500], row])
    with pytest.raises(InputError, match=message):
        load_sales(file)


def test_large_table_is_read_with_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"a,{row},{row},{row % 2}" for row in range(20_000)]
    file = write_sales(tmp_path, rows)
    monkeypatch.setattr(tables, "ROWS", 256)
    monkeypatch.setattr(large, "MAX_IN_MEMORY", 0)
    tracemalloc.start()
    table = read_table(file, "price", ["size", "rooms"] * 20, None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 20,000 rows of 40 integers; tracemalloc does not count memory-mapped files.
    assert table.samples.nbytes > 6e6
    assert peak < 2e6


# --------------------------------------------------------------------------------------------------------------- splits

BY_SHOP = SplitPart(column="shop")


def test_split_by_column_gives_each_device_one_shop(tmp_path: Path) -> None:
    data = load_sales(write_sales(tmp_path), split={"column": "shop"})
    shares = split_samples(
        data.train_labels, 2, ["x", "y", "z"], BY_SHOP, 1, data.groups
    )
    owned_shops = []
    for share in shares.values():
        (owned_shop,) = set(data.groups[share].tolist())
        owned_shops.append(owned_shop)
    assert sorted(owned_shops) == [0, 1, 2]
    assert sum(map(len, shares.values())) == len(data.train_labels)


def test_split_by_column_with_too_few_values_is_rejected(tmp_path: Path) -> None:
    data = load_sales(write_sales(tmp_path), split={"column": "shop"})
    with pytest.raises(InputError, match="fewer values than there are devices"):
        split_samples(data.train_labels, 2, list("wxyz"), BY_SHOP, 1, data.groups)
    with pytest.raises(InputError, match="these data have no columns"):
        split_samples(data.train_labels, 2, list("xy"), BY_SHOP, 1)


def test_quantity_split_skews_sizes_but_not_classes() -> None:
    labels = np.arange(2000) % 2
    shares = split_samples(labels, 2, list("abcd"), SplitPart(quantity=1.0), 3)
    sizes = sorted(map(len, shares.values()))
    assert sum(sizes) == 2000
    assert sizes[-1] > 2 * sizes[0]
    for share in shares.values():
        assert abs(labels[share].mean() - 0.5) < 0.15


def test_devices_train_on_their_own_rows(tmp_path: Path) -> None:
    table = write_sales(tmp_path)
    file = tmp_path / "shops.yaml"
    file.write_text(
        "name: shops\ndevices: {server: {profile: laptop}, shop: {profile: laptop, count: 3}}\n"
        "network: {topology: star, link: {rate: 100mbit, delay: 1ms}}\n"
        "workload:\n  model: {name: mlp, hidden: [8]}\n"
        "  data: {path: sales.csv, label: price, columns: [size, rooms], split: {column: shop}}\n"
        "  method: {name: federated, local_steps: 2}\n  batch_size: 8\n  steps: 4\n"
    )
    prepared = prepare(trials(load_scenario(file))[0])
    outcome = simulate(prepared, load(prepared.scenario.workload.data, table))
    assert outcome.status == "finished", outcome.error
    # Of 40 rows of each shop, about a fifth are test samples.
    sizes = [len(share) for share in shares_of(prepared).values()]
    assert sizes == pytest.approx([32] * 3, abs=6)


# --------------------------------------------------------------------------------------------------------- command line


def test_show_data_prints_classes_and_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_sales(tmp_path)
    show = ["show", "data", f"{file}:price", "--split", "column=shop", "--devices", "3"]
    command.main(show, standalone_mode=False)
    assert "samples of 2" in capsys.readouterr().out
    command.main([*show, "--json"], standalone_mode=False)
    output = json.loads(capsys.readouterr().out)
    shared = sum(map(sum, output["shares"].values()))
    assert shared == output["samples"]["train"]


def test_show_models_accepts_network_and_data_of_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "mine.py"
    data.write_text(
        "import numpy as np\ndef load():\n    return (np.ones((8, 5), int), np.arange(8) % 2), None\n"
    )
    network = tmp_path / "net.py"
    network.write_text(
        "from torch import nn\ndef build():\n"
        "    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 2))\n"
    )
    arguments = ["show", "models", str(network), "build"]
    arguments += ["--data", f"{data}:load", "--json"]
    command.main(arguments, standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["input"] == [5]
