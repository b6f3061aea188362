"""Tables: columns by name, words, what is wrong with its place, and splits by a column."""

from __future__ import annotations

import importlib.util
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from testbed.common.errors import InputError
from testbed.ml.data import large, load, tables
from testbed.ml.data.split import split
from testbed.ml.data.tables import read as read_table
from testbed.ml.preparation import shares_of
from testbed.ml.workload import DataPart, SplitPart
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load as load_scenario
from testbed.simulation import simulate
from testbed_controller.cli.main import testbed as command

ROWS = [
    f"{shop},{size},{size % 3}.5,{'dear' if size > 20 else 'cheap'}"
    for shop in ("a", "b", "c")
    for size in range(5, 45)
]


def table(folder: Path, rows: list[str] = ROWS) -> Path:
    file = folder / "sales.csv"
    file.write_text("\n".join(["shop,size,rooms,price", *rows]) + "\n")
    return file


def read(file: Path, **keys: object):
    return load(
        DataPart.model_validate({"path": str(file), "label": "price", **keys}), file
    )


def test_a_row_is_a_sample_and_words_are_classes(tmp_path: Path) -> None:
    found = read(table(tmp_path), columns=["size", "rooms"])
    assert found.shape == (2,)
    assert found.classes == 2
    assert len(found.train_labels) + len(found.test_labels) == len(ROWS)
    assert found.train_images.dtype == np.float32
    assert np.array_equal(
        found.train_labels == 1, found.train_images[:, 0] > 20
    )  # cheap, dear
    numbers = read(table(tmp_path), label="rooms", columns=["shop", "size"])
    assert numbers.train_labels.dtype == np.float32
    assert numbers.integers


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        (
            ROWS,
            {"label": "cost"},
            "no column 'cost': there are shop, size, rooms, price",
        ),
        (ROWS, {"columns": ["width"]}, "data.columns: .* no column 'width'"),
        (["a,1,2,cheap", "b,,2,dear"], {}, "column 'size' is empty in row 2"),
        (
            ["a,1,2,cheap", "b,2,dear"],
            {},
            r"sales.csv:3: has 3 cells, the first line 4",
        ),
        ([], {}, "holds no rows"),
    ],
)
def test_malformed_tables_are_rejected_with_the_row(
    tmp_path: Path, rows: list[str], keys: dict, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read(table(tmp_path, rows), **keys)


@pytest.mark.skipif(bool(importlib.util.find_spec("pyarrow")), reason="pyarrow is here")
def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path) -> None:
    file = tmp_path / "sales.parquet"
    file.write_bytes(b"")
    with pytest.raises(InputError, match=r"pip install 'edge-testbed\[frames\]'"):
        read(file)


@pytest.mark.skipif(
    not importlib.util.find_spec("pyarrow"), reason="needs pyarrow: the extra `frames`"
)
def test_parquet_is_read_as_csv_is(tmp_path: Path) -> None:
    from pyarrow import csv, parquet

    file = table(tmp_path)
    parquet.write_table(csv.read_csv(file), tmp_path / "sales.parquet")
    ours, theirs = read(file), read(tmp_path / "sales.parquet")
    assert np.array_equal(ours.train_images, theirs.train_images)
    assert np.array_equal(ours.train_labels, theirs.train_labels)


def test_a_table_of_any_size_is_read_a_block_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        f"shop{row % 7},{row},{row / 2 if row > 900 else row},{'dear' if row % 3 else 'cheap'}"
        for row in range(1000)
    ]
    in_memory = read(
        table(tmp_path, rows),
        split={"column": "shop"},
        columns=["shop", "size", "rooms"],
    )
    monkeypatch.setattr(tables, "ROWS", 64)
    monkeypatch.setattr(large, "LARGE", 1000)
    in_files = read(
        table(tmp_path, rows),
        split={"column": "shop"},
        columns=["shop", "size", "rooms"],
    )
    assert isinstance(in_files.train_images, np.memmap)
    for name in (
        "train_images",
        "train_labels",
        "test_images",
        "test_labels",
        "groups",
    ):
        assert np.array_equal(getattr(in_memory, name), getattr(in_files, name)), name
    assert in_memory.train_images.dtype == in_files.train_images.dtype == np.float32
    with pytest.raises(InputError, match="column 'size' is empty in row 501"):
        read(table(tmp_path, [*rows[:500], "shop1,,2,dear"]))
    with pytest.raises(InputError, match=r"sales.csv:502: has 2 cells"):
        read(table(tmp_path, [*rows[:500], "shop1,2"]))


def test_reading_a_large_table_takes_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = table(tmp_path, [f"a,{row},{row},{row % 2}" for row in range(20_000)])
    monkeypatch.setattr(tables, "ROWS", 256)
    monkeypatch.setattr(large, "LARGE", 0)
    tracemalloc.start()
    found = read_table(file, "price", ["size", "rooms"] * 20, None)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.samples.nbytes > 6e6
    assert most < 2e6


def test_samples_of_one_value_stay_together(tmp_path: Path) -> None:
    found = read(table(tmp_path), split={"column": "shop"})
    how = SplitPart(column="shop")
    shares = split(found.train_labels, 2, ["x", "y", "z"], how, 1, found.groups)
    assert (
        sorted(
            found.groups[share].tolist().count(value) > 0
            for share in shares.values()
            for value in (0, 1, 2)
        )
        == [False] * 6 + [True] * 3
    )
    assert sum(map(len, shares.values())) == len(found.train_labels)
    with pytest.raises(InputError, match="too few values"):
        split(found.train_labels, 2, list("wxyz"), how, 1, found.groups)
    with pytest.raises(InputError, match="these data have no columns"):
        split(found.train_labels, 2, list("xy"), how, 1)


def test_quantities_are_skewed_and_classes_are_not() -> None:
    labels = np.arange(2000) % 2
    shares = split(labels, 2, list("abcd"), SplitPart(quantity=1.0), 3)
    sizes = sorted(map(len, shares.values()))
    assert sum(sizes) == 2000
    assert sizes[-1] > 2 * sizes[0]
    assert all(abs(labels[share].mean() - 0.5) < 0.15 for share in shares.values())


def test_devices_learn_from_their_own_rows(tmp_path: Path) -> None:
    table(tmp_path)
    file = tmp_path / "shops.yaml"
    file.write_text(
        "name: shops\ndevices: {server: {profile: laptop}, shop: {profile: laptop, count: 3}}\n"
        "network: {topology: star, link: {rate: 100mbit, delay: 1ms}}\n"
        "workload:\n  model: {name: mlp, hidden: [8]}\n"
        "  data: {path: sales.csv, label: price, columns: [size, rooms], split: {column: shop}}\n"
        "  method: {name: federated, local_steps: 2}\n  batch_size: 8\n  steps: 4\n"
    )
    prepared = prepare(trials(load_scenario(file))[0])
    outcome = simulate(
        prepared, load(prepared.scenario.workload.data, tmp_path / "sales.csv")
    )
    assert outcome.status == "finished", outcome.error
    assert [len(share) for share in shares_of(prepared).values()] == pytest.approx(
        [32] * 3, abs=6
    )


def test_pictures_with_their_colours_last_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "last.npz"
    np.savez(file, x_train=np.zeros((4, 16, 16, 3)), y_train=np.arange(4) % 2)
    with pytest.raises(
        InputError, match=r"colours last, .* numpy.moveaxis\(samples, -1, 1\)"
    ):
        load(DataPart(path=str(file)), file)


def test_data_show_lists_classes_and_owners(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = table(tmp_path)
    look = ["show", "data", f"{file}:price", "--split", "column=shop", "--devices", "3"]
    command.main(look, standalone_mode=False)
    assert "samples of 2" in capsys.readouterr().out
    command.main([*look, "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert sum(map(sum, found["shares"].values())) == found["samples"]["train"]
    own = tmp_path / "mine.py"
    own.write_text(
        "import numpy as np\ndef load():\n    return (np.ones((8, 5), int), np.arange(8) % 2), None\n"
    )
    net = tmp_path / "net.py"
    net.write_text(
        "from torch import nn\ndef build():\n"
        "    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 2))\n"
    )
    command.main(
        ["show", "models", str(net), "build", "--data", f"{own}:load", "--json"],
        standalone_mode=False,
    )
    assert json.loads(capsys.readouterr().out)["input"] == [5]


def of(
    folder: Path,
    text: str,
    label: str | None = "price",
    columns=None,
    group: str | None = None,
):
    file = folder / "own.csv"
    file.write_text(text)
    return read_table(file, label, columns, group)


def test_columns_are_whole_numbers_numbers_or_words_in_the_order_of_the_alphabet(
    tmp_path: Path,
) -> None:
    text = "town,size,rooms,sold,price\nx,5,1.5,True,3\na,7,2,False,0\n"
    words = of(tmp_path, text, columns=["town", "size", "sold"])
    assert words.samples.tolist() == [[1, 5, 1], [0, 7, 0]]
    assert words.samples.dtype == np.int64
    assert words.labels.tolist() == [3, 0]
    mixed = of(tmp_path, text)
    assert mixed.samples.dtype == np.float32
    assert mixed.samples.tolist() == [[1, 5, 1.5, 1], [0, 7, 2, 0]]
    assert mixed.groups is None


def test_split_column_is_part_of_samples_only_if_named(
    tmp_path: Path,
) -> None:
    text = "town,size,price\nx,5,1\na,7,0\nx,8,0\n"
    found = of(tmp_path, text, group="town")
    assert found.samples.tolist() == [[5], [7], [8]]
    assert found.groups.tolist() == [1, 0, 1]
    assert of(tmp_path, text, columns=["town", "size"], group="town").samples.shape == (
        3,
        2,
    )


def test_columns_of_several_inputs(tmp_path: Path) -> None:
    text = "town,size,rooms,price\nx,5,1.5,1\na,7,2,0\n"
    found = of(tmp_path, text, columns={"where": ["town"], "what": ["size", "rooms"]})
    assert {name: each.tolist() for name, each in found.samples.items()} == {
        "where": [[1], [0]],
        "what": [[5, 1.5], [7, 2]],
    }
    assert [each.dtype for each in found.samples.values()] == [np.int64, np.float32]


@pytest.mark.parametrize("cell", ["", " ", "nan", "NaN", "NAN", "None", "-nan"])
def test_empty_cells_are_rejected_in_every_notation(tmp_path: Path, cell: str) -> None:
    with pytest.raises(InputError, match="column 'size' is empty in row 2"):
        of(tmp_path, f"size,price\n5,1\n{cell},0\n")


def test_names_of_columns_may_have_blanks_and_a_byte_order_mark_before_them(
    tmp_path: Path,
) -> None:
    assert of(tmp_path, "\ufeffsize, price\n5,1\n\n7,0\n").samples.tolist() == [
        [5],
        [7],
    ]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"own\.csv: has two columns 'size': rename one"
    ):
        of(tmp_path, "size,size,price\n5,6,1\n7,8,0\n")


@pytest.mark.skipif(
    not importlib.util.find_spec("pyarrow"), reason="needs pyarrow: the extra `frames`"
)
def test_two_columns_of_one_name_are_refused_in_parquet_too(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    file = tmp_path / "own.parquet"
    parquet.write_table(
        pyarrow.table([[1], [2], [3]], names=["size", "size", "price"]), file
    )
    with pytest.raises(InputError, match=r"own\.parquet: has two columns 'size'"):
        read_table(file, "price", None, None)


def test_table_without_a_label_lists_its_columns(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="has the columns size, price: name the one of the labels"
    ):
        of(tmp_path, "size,price\n5,1\n", label=None)
    with pytest.raises(InputError, match="a sample needs at least one more"):
        of(tmp_path, "price\n1\n")
