"""Data of the user's: read from each kind of place, refused in one line, and never unpickled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from safetensors.numpy import save_file

from testbed.common.errors import InputError
from testbed.ml.data import load
from testbed.ml.preparation import load_data
from testbed.ml.workload import DataPart
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load as load_scenario
from testbed.simulation import simulate
from tests.helpers import ROOT, deployments, own_tokens

IMAGES = np.arange(40 * 12, dtype=np.uint8).reshape(40, 1, 3, 4)
LABELS = np.arange(40) % 4


def arrays() -> dict[str, np.ndarray]:
    parts = {"train": slice(30), "test": slice(30, 40)}
    return {
        f"{part}_{kind}": values[place]
        for part, place in parts.items()
        for kind, values in (("images", IMAGES), ("labels", LABELS))
    }


def read(file: Path, **keys: object):
    return load(DataPart.model_validate({"path": file.name, **keys}), file)


def test_arrays_are_read_from_npz_and_safetensors(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", **arrays())
    save_file(arrays(), tmp_path / "mine.safetensors")
    for name in ("mine.npz", "mine.safetensors"):
        found = read(tmp_path / name, train=20)
        assert (found.name, found.classes, found.shape) == (name, 4, (1, 3, 4))
        assert np.array_equal(found.train_images, IMAGES[:20].astype(np.float32) / 255)
        assert np.array_equal(found.test_labels, LABELS[30:])


def test_one_fifth_becomes_the_test_part_if_data_have_none(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x_train=IMAGES.astype(np.float64), y_train=LABELS)
    found = read(tmp_path / "mine.npz")
    assert np.bincount(found.test_labels).tolist() == [2, 2, 2, 2]
    assert found.train_images.max() > 200  # only bytes are scaled


def test_pictures_by_class(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("test", 1)):
        for label, grey in (("cats", 10), ("dogs", 200)):
            folder = tmp_path / "pets" / part / label
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("L", (6, 4), grey).save(folder / f"{number}.png")
    found = read(tmp_path / "pets")
    assert (found.name, found.shape, found.classes) == ("pets/", (3, 4, 6), 2)
    assert found.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.test_images[1].min() == pytest.approx(200 / 255)
    Image.new("L", (9, 9)).save(tmp_path / "pets" / "test" / "dogs" / "large.png")
    with pytest.raises(
        InputError,
        match=r"large.png is of 9x9, others of 4x6: write `size: HEIGHTxWIDTH`",
    ):
        read(tmp_path / "pets")
    assert read(tmp_path / "pets", size="8x8").shape == (3, 8, 8)


def test_functions_may_return_arrays_and_data_sets(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def pairs():\n"
        "    images, labels = torch.rand(8, 5), torch.arange(8) % 2\n"
        "    return TensorDataset(images, labels), (images, labels)\n"
        "def wrong():\n    return 1\n"
        "def broken():\n    return 1 / 0\n"
    )
    found = load(DataPart(file="mine.py", name="pairs"), file)
    assert (found.shape, found.classes, len(found.train_labels)) == ((5,), 2, 8)
    assert np.array_equal(found.train_images, found.test_images)
    for name, message in (
        ("wrong", r"wrong returned int: return \(train, test\)"),
        ("broken", "mine.py:9: ZeroDivisionError"),
        ("none", "there: pairs, wrong, broken"),
    ):
        with pytest.raises(InputError, match=message):
            load(DataPart(file="mine.py", name=name), file)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "mine.npz",
        train_images=np.array([{}, {}], dtype=object),
        train_labels=LABELS[:2],
    )
    with pytest.raises(
        InputError, match=r"mine.npz: holds Python objects, and nothing is unpickled"
    ):
        read(tmp_path / "mine.npz")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train_labels": LABELS[:7]}, "30 samples and 7 labels"),
        ({"train_labels": LABELS[:30] - 2}, "whole numbers from 0"),
        ({"train_labels": np.full(30, 1e300)}, "finite numbers of float32"),
        ({"train_labels": np.full(30, np.nan)}, "finite numbers of float32"),
        ({"test_images": IMAGES[30:, :, :2]}, "give both one shape"),
        (
            {"train_images": np.full((30, 4), np.nan)},
            "contain values that are not finite",
        ),
        (
            {"train_images": np.full((30, 4), 1e300)},
            "contain values that are not finite in float32",
        ),
        ({"train_images": np.array(["a"] * 30)}, "give numbers of"),
        ({"train_images": np.float32(1)}, "no array of samples and 30 labels"),
        (
            {"train_labels": LABELS[:30] + 1000},
            "labels up to 1003 for 40 samples: number the classes from 0",
        ),
    ],
)
def test_malformed_data_are_rejected_with_the_reason(
    tmp_path: Path, changed: dict, message: str
) -> None:
    np.savez(tmp_path / "mine.npz", **(arrays() | changed))
    with pytest.raises(InputError, match=message):
        read(tmp_path / "mine.npz")


def test_tests_without_labels_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x_train=IMAGES, y_train=LABELS, x_test=IMAGES)
    with pytest.raises(
        InputError, match="holds one of x_test and y_test: it needs both or none"
    ):
        read(tmp_path / "mine.npz")


def test_types_unknown_to_numpy_are_rejected(tmp_path: Path) -> None:
    tensors = {
        "x_train": torch.zeros(4, 2).bfloat16(),
        "y_train": torch.zeros(4, dtype=torch.int64),
    }
    safetensors.torch.save_file(tensors, tmp_path / "mine.safetensors")
    with pytest.raises(
        InputError,
        match=r"mine.safetensors: cannot be read: .*bfloat16.*: write it as float32",
    ):
        read(tmp_path / "mine.safetensors")


def test_folders_without_pictures_are_named(tmp_path: Path) -> None:
    for name in ("train/cats", "train/dogs", "test/cats", "test/birds"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        Image.new("L", (6, 4)).save(tmp_path / "pets" / name / "0.png")
    with pytest.raises(InputError, match="test: no training images of birds"):
        read(tmp_path / "pets")
    (tmp_path / "pets" / "train" / "dogs" / "0.png").unlink()
    with pytest.raises(
        InputError, match="train: no images of dogs: add some or remove the folder"
    ):
        read(tmp_path / "pets")


def test_results_of_functions_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np, torch, sys\nfrom PIL import Image\n"
        "X, Y = np.zeros((4, 1, 2, 2), dtype='float32'), np.arange(4) % 2\n"
        "def no_tests(): return (X, Y), None\n"
        "def gradients(): return (torch.from_numpy(X).requires_grad_(), Y), (X, Y)\n"
        "def two_pairs(): return [(X[0], 0), (X[1], 1)], (X, Y)\n"
        "def pictures(): return [(Image.new('RGB', (6, 4)), 0)], [(Image.new('RGB', (6, 4)), 0)]\n"
        "def ragged(): return [(X[0], 0), (X[0][:, :1], 1)], (X, Y)\n"
        "def half(): return (torch.zeros(2, 3).bfloat16(), Y[:2]), (X, Y)\n"
        "def leaves(): sys.exit(3)\n"
    )
    for name, shape in (
        ("no_tests", (1, 2, 2)),
        ("gradients", (1, 2, 2)),
        ("two_pairs", (1, 2, 2)),
        ("pictures", (3, 4, 6)),
    ):
        assert load(DataPart(file="mine.py", name=name), file).shape == shape
    for name, message in (
        ("ragged", "each sample of one shape"),
        ("half", "have to be arrays"),
        ("leaves", "mine.py:10: SystemExit: 3"),
    ):
        with pytest.raises(InputError, match=message):
            load(DataPart(file="mine.py", name=name), file)


def test_a_size_is_for_pictures_and_has_two_sides(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", **arrays())
    with pytest.raises(
        InputError, match="size: applies to folders of images only: remove the key"
    ):
        read(tmp_path / "mine.npz", size="8x8")
    with pytest.raises(ValueError, match="'8' is not HEIGHTxWIDTH, such as 32x32"):
        DataPart.model_validate({"path": "pets", "size": "8"})


def test_files_without_arrays_are_rejected(tmp_path: Path) -> None:
    for name in ("mine.npz", "mine.safetensors", "mine.txt"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        with pytest.raises(InputError, match=name):
            read(tmp_path / name)
    with pytest.raises(InputError, match=r"none.npz cannot be read: No such file"):
        read(tmp_path / "none.npz")


def test_own_data_are_split_and_devices_need_no_files(
    tmp_path: Path,
) -> None:
    np.savez(tmp_path / "mine.npz", **arrays())
    (tmp_path / "mine.yaml").write_text(
        "name: mine\ndevices: {source: {profile: laptop}, worker: {profile: laptop, count: 2}}\n"
        "network: {link: {rate: 100mbit, delay: 1ms}}\n"
        "workload:\n  model: {name: mlp, hidden: [8]}\n  data: {path: mine.npz, split: {sizes: [10, 20]}}\n"
        "  method: {name: federated}\n  epochs: 1\n  batch_size: 5\n"
    )
    prepared = prepare(trials(load_scenario(tmp_path / "mine.yaml"))[0])
    assert dict(prepared.problem.samples) == {"worker1": 10, "worker2": 20}
    (tmp_path / "mine.npz").unlink()
    for body in deployments.deployment_bodies(prepared).values():
        assert deployments.read_deployment(body)[1].model == prepared.problem.model


def test_documented_example_of_own_data_works() -> None:
    text = (ROOT / "docs" / "own.md").read_text()
    file = ROOT / "scenarios" / "examples" / "own.yaml"
    assert text.split("```yaml\n")[1].split("```")[0] in file.read_text()
    prepared = prepare(trials(load_scenario(file))[0])
    assert [
        len(assignment.units) if hasattr(assignment, "units") else assignment
        for assignment in prepared.plan.assignments
    ]
    assert len(prepared.problem.model.units) == 5


def test_a_batch_or_a_number_of_samples_beyond_the_data_is_refused_before_the_run(
    tmp_path: Path,
) -> None:
    np.savez(tmp_path / "mine.npz", **arrays())
    (tmp_path / "s.yaml").write_text(
        "name: s\ndevices: {a: {}}\nworkload: {model: {name: mlp}, data: {path: mine.npz}, method: {name: single}, "
        "batch_size: 30, steps: 1}\n"
    )

    def prepared(*changes: str) -> None:
        prepare(trials(load_scenario(tmp_path / "s.yaml", changes))[0])

    prepared()
    with pytest.raises(
        InputError,
        match="batch_size: a batch of 31 is more than the 30 training samples: use at most",
    ):
        prepared("workload.batch_size=31")
    with pytest.raises(
        InputError,
        match="batch_size: a batch of 30 is more than the 20 training samples",
    ):
        prepared("workload.data.train=20")
    with pytest.raises(InputError, match=r"workload\.data\.train: .* 31"):
        prepared("workload.data.train=31")


def tokens(folder: Path, *changes: str):
    """Return the scenario of tokens, ready for a runtime."""
    (folder / "own_tokens.py").write_text(
        (ROOT / "tests" / "helpers" / "own_tokens.py").read_text()
    )
    (folder / "tokens.yaml").write_text(own_tokens.SCENARIO)
    return prepare(trials(load_scenario(folder / "tokens.yaml", changes))[0])


def test_integers_stay_integers_for_networks_accepting_them(tmp_path: Path) -> None:
    prepared = tokens(tmp_path)
    model, data = prepared.problem.model, load_data(prepared)
    assert (model.input, model.integers) == ((7,), True)
    assert data.train_images.dtype == np.int64
    for body in deployments.deployment_bodies(prepared).values():
        assert deployments.read_deployment(body)[1].model == model
    losses = {}
    for method in ("single", "pipeline"):
        outcome = simulate(
            tokens(tmp_path, f"workload.method={{name: {method}}}"), data
        )
        assert outcome.status == "finished", outcome.error
        losses[method] = [
            event.fields["loss"] for event in outcome.events if event.event == "step"
        ]
    assert losses["pipeline"] == pytest.approx(losses["single"], rel=1e-5)
    assert losses["single"][-1] < losses["single"][0]


def test_networks_rejecting_integers_get_floats(tmp_path: Path) -> None:
    prepared = tokens(tmp_path, "workload.model={name: mlp, hidden: [8, 8]}")
    assert not prepared.problem.model.integers
    data = load_data(prepared)
    assert data.train_images.dtype == np.float32
    outcome = simulate(prepared, data)
    assert outcome.status == "finished", outcome.error


def test_training_and_test_samples_have_one_type(tmp_path: Path) -> None:
    whole = np.arange(40).reshape(10, 4)
    np.savez(
        tmp_path / "mine.npz",
        x_train=whole,
        y_train=LABELS[:10],
        x_test=whole * 1.5,
        y_test=LABELS[:10],
    )
    found = read(tmp_path / "mine.npz")
    assert {found.train_images.dtype.name, found.test_images.dtype.name} == {"float32"}
