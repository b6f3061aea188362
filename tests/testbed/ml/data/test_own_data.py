"""Users' data: arrays, folders of images, malformed data, and integers as samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from safetensors.numpy import save_file

from testbed.common.errors import InputError
from testbed.ml.data import load
from testbed.ml.data.dataset import Dataset
from testbed.ml.preparation import load_data
from testbed.ml.workload import DataPart
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load as load_scenario
from testbed.simulation import simulate
from testbed.trace.outcome import Outcome
from tests.helpers import ROOT, deployments, own_tokens

IMAGES = np.arange(40 * 12, dtype=np.uint8).reshape(40, 1, 3, 4)
LABELS = np.arange(40) % 4
ARRAYS = {
    "train_images": IMAGES[:30],
    "train_labels": LABELS[:30],
    "test_images": IMAGES[30:],
    "test_labels": LABELS[30:],
}


def load_file(file: Path, **keys: object) -> Dataset:
    return load(DataPart.model_validate({"path": file.name, **keys}), file)


def prepare_file(file: Path, changes: Sequence[str] = ()) -> Prepared:
    return prepare(trials(load_scenario(file, changes))[0])


def run_to_end(prepared: Prepared) -> Outcome:
    outcome = simulate(prepared, load_data(prepared))
    assert outcome.status == "finished", outcome.error
    return outcome


# --------------------------------------------------------------------------------------------------------------- arrays


@pytest.mark.parametrize("name", ["mine.npz", "mine.safetensors"])
def test_arrays_are_read_from_file(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    if file.suffix == ".npz":
        np.savez(file, **ARRAYS)
    else:
        save_file(ARRAYS, file)
    data = load_file(file, train=20)
    assert data.name == name
    assert data.classes == 4
    assert data.shape == (1, 3, 4)
    # Bytes are scaled to numbers from 0 to 1.
    assert np.array_equal(data.train_images, IMAGES[:20].astype(np.float32) / 255)
    assert np.array_equal(data.test_labels, LABELS[30:])


def test_fifth_of_each_class_becomes_test_samples_by_default(tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    np.savez(file, x_train=IMAGES.astype(np.float64), y_train=LABELS)
    data = load_file(file)
    assert np.bincount(data.test_labels).tolist() == [2, 2, 2, 2]
    # Floats are not scaled.
    assert data.train_images.max() > 200


def test_python_objects_are_never_unpickled(tmp_path: Path) -> None:
    # Unpickling can run any code of the file's author.
    objects = np.array([{}, {}], dtype=object)
    np.savez(tmp_path / "mine.npz", train_images=objects, train_labels=LABELS[:2])
    message = r"mine.npz: contains Python objects, which are not unpickled"
    with pytest.raises(InputError, match=message):
        load_file(tmp_path / "mine.npz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": LABELS[:7]}, "30 samples and 7 labels"),
        ({"train_labels": LABELS[:30] - 2}, "whole numbers from 0"),
        ({"train_labels": np.empty((30, 0), int)}, r"labels \(30, 0\) of int64"),
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
    ids=[
        "too-few-labels",
        "negative-labels",
        "labels-without-values",
        "overflowing-labels",
        "labels-not-a-number",
        "different-shapes",
        "samples-not-a-number",
        "overflowing-samples",
        "texts",
        "single-number",
        "labels-beyond-samples",
    ],
)
def test_malformed_arrays_are_rejected_with_reason(
    tmp_path: Path, changes: dict[str, np.ndarray], message: str
) -> None:
    np.savez(tmp_path / "mine.npz", **(ARRAYS | changes))
    with pytest.raises(InputError, match=message):
        load_file(tmp_path / "mine.npz")


def test_test_samples_without_labels_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    np.savez(file, x_train=IMAGES, y_train=LABELS, x_test=IMAGES)
    message = "has one of x_test and y_test: add the other, or remove both"
    with pytest.raises(InputError, match=message):
        load_file(file)


def test_type_unknown_to_numpy_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "mine.safetensors"
    tensors = {
        "x_train": torch.zeros(4, 2).bfloat16(),
        "y_train": torch.zeros(4, dtype=torch.int64),
    }
    safetensors.torch.save_file(tensors, file)
    message = r"mine.safetensors: cannot be read: .*bfloat16.*: write it as float32"
    with pytest.raises(InputError, match=message):
        load_file(file)


@pytest.mark.parametrize("name", ["mine.npz", "mine.safetensors", "mine.txt"])
def test_file_in_other_format_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match=name):
        load_file(tmp_path / name)


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.npz cannot be read: No such file"):
        load_file(tmp_path / "none.npz")


def test_training_and_test_samples_get_common_type(tmp_path: Path) -> None:
    integers = np.arange(40).reshape(10, 4)
    labels = LABELS[:10]
    file = tmp_path / "mine.npz"
    np.savez(
        file, x_train=integers, y_train=labels, x_test=integers * 1.5, y_test=labels
    )
    data = load_file(file)
    assert data.train_images.dtype == np.float32
    assert data.test_images.dtype == np.float32


# ---------------------------------------------------------------------------------------------------- folders of images


def write_picture(path: Path, size: tuple[int, int], grey: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, grey).save(path)


def write_pets(folder: Path) -> Path:
    """Write three training images and a test image of cats, which are dark, and of dogs, which are bright."""
    for label, grey in (("cats", 10), ("dogs", 200)):
        for number in range(3):
            write_picture(folder / "train" / label / f"{number}.png", (6, 4), grey)
        write_picture(folder / "test" / label / "0.png", (6, 4), grey)
    return folder


def test_folders_of_images_are_classes(tmp_path: Path) -> None:
    data = load_file(write_pets(tmp_path / "pets"))
    assert data.name == "pets/"
    assert data.shape == (3, 4, 6)
    assert data.classes == 2
    assert data.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test_images[1].min() == pytest.approx(200 / 255)


def test_images_of_different_sizes_require_size(tmp_path: Path) -> None:
    pets = write_pets(tmp_path / "pets")
    write_picture(pets / "test" / "dogs" / "large.png", (9, 9))
    message = r"large.png has 9x9 pixels, others 4x6: write `size: HEIGHTxWIDTH`"
    with pytest.raises(InputError, match=message):
        load_file(pets)
    assert load_file(pets, size="8x8").shape == (3, 8, 8)


def test_size_applies_to_images_only(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", **ARRAYS)
    message = "size: applies to folders of images only: remove the key"
    with pytest.raises(InputError, match=message):
        load_file(tmp_path / "mine.npz", size="8x8")


def test_malformed_size_is_rejected() -> None:
    with pytest.raises(ValueError, match="'8' is not HEIGHTxWIDTH, such as 32x32"):
        DataPart.model_validate({"path": "pets", "size": "8"})


def test_class_without_training_images_is_named(tmp_path: Path) -> None:
    pets = write_pets(tmp_path / "pets")
    write_picture(pets / "test" / "birds" / "0.png", (6, 4))
    with pytest.raises(
        InputError, match="test: the classes birds have no training images"
    ):
        load_file(pets)


def test_empty_folder_of_class_is_named(tmp_path: Path) -> None:
    pets = write_pets(tmp_path / "pets")
    for path in (pets / "train" / "dogs").iterdir():
        path.unlink()
    message = "train: no images of dogs: add some or remove the folder"
    with pytest.raises(InputError, match=message):
        load_file(pets)


# ------------------------------------------------------------------------------------------------------------ scenarios


def test_shares_of_user_data_reach_devices_without_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", **ARRAYS)
    scenario = tmp_path / "mine.yaml"
    scenario.write_text(
        "name: mine\ndevices: {source: {profile: laptop}, worker: {profile: laptop, count: 2}}\n"
        "network: {link: {rate: 100mbit, delay: 1ms}}\n"
        "workload:\n  model: {name: mlp, hidden: [8]}\n  data: {path: mine.npz, split: {sizes: [10, 20]}}\n"
        "  method: {name: federated}\n  epochs: 1\n  batch_size: 5\n"
    )
    prepared = prepare_file(scenario)
    assert dict(prepared.problem.samples) == {"worker1": 10, "worker2": 20}
    # Devices do not have the user's file.
    (tmp_path / "mine.npz").unlink()
    for body in deployments.deployment_bodies(prepared).values():
        _, problem, _ = deployments.read_deployment(body)
        assert problem.model == prepared.problem.model


def test_documented_example_of_user_data_works() -> None:
    text = (ROOT / "docs" / "own.md").read_text()
    file = ROOT / "scenarios" / "examples" / "own.yaml"
    after_fence = text.split("```yaml\n")[1]
    excerpt = after_fence.split("```")[0]
    assert excerpt in file.read_text()
    prepared = prepare_file(file)
    assert prepared.plan.assignments
    assert len(prepared.problem.model.units) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "workload.batch_size=31",
            "batch_size: a batch of 31 is more than the 30 training samples: use at most",
        ),
        (
            "workload.data.train=20",
            "batch_size: a batch of 30 is more than the 20 training samples",
        ),
        ("workload.data.train=31", r"workload\.data\.train: .* 31"),
    ],
)
def test_batch_or_limit_beyond_data_is_rejected_before_run(
    tmp_path: Path, change: str, message: str
) -> None:
    np.savez(tmp_path / "mine.npz", **ARRAYS)
    file = tmp_path / "s.yaml"
    file.write_text(
        "name: s\ndevices: {a: {}}\nworkload: {model: {name: mlp}, data: {path: mine.npz}, method: {name: single}, "
        "batch_size: 30, steps: 1}\n"
    )
    # A batch of all 30 training samples is possible.
    prepare_file(file)
    with pytest.raises(InputError, match=message):
        prepare_file(file, [change])


# ------------------------------------------------------------------------------------------------------------- integers


def prepare_tokens(folder: Path, *changes: str) -> Prepared:
    """Prepare the scenario of `own_tokens`, where samples are sequences of integers."""
    source = (ROOT / "tests" / "helpers" / "own_tokens.py").read_text()
    (folder / "own_tokens.py").write_text(source)
    (folder / "tokens.yaml").write_text(own_tokens.SCENARIO)
    return prepare_file(folder / "tokens.yaml", changes)


def test_network_with_embedding_receives_integers(tmp_path: Path) -> None:
    prepared = prepare_tokens(tmp_path)
    model = prepared.problem.model
    assert model.input == (7,)
    assert model.integers
    assert load_data(prepared).train_images.dtype == np.int64
    for body in deployments.deployment_bodies(prepared).values():
        _, problem, _ = deployments.read_deployment(body)
        assert problem.model == model


def test_pipeline_on_integers_has_losses_of_single_device(tmp_path: Path) -> None:
    def losses_with(method: str) -> list[float]:
        prepared = prepare_tokens(tmp_path, f"workload.method={{name: {method}}}")
        steps = run_to_end(prepared).events.of("step")
        return [event.fields["loss"] for event in steps]

    single = losses_with("single")
    assert losses_with("pipeline") == pytest.approx(single, rel=1e-5)
    assert single[-1] < single[0]


def test_network_without_embedding_receives_floats(tmp_path: Path) -> None:
    prepared = prepare_tokens(tmp_path, "workload.model={name: mlp, hidden: [8, 8]}")
    assert not prepared.problem.model.integers
    assert load_data(prepared).train_images.dtype == np.float32
    run_to_end(prepared)
