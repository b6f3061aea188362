"""Memory-mapped arrays in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from testbed.ml.data import large, load
from testbed.ml.data.dataset import pack, unpack
from testbed.ml.workload import DataPart

PICTURES = np.random.default_rng(1).random((20, 1, 8, 8)).astype(np.float32)
LABELS = np.arange(20) % 4


def write_arrays(folder: Path) -> np.ndarray:
    """Write 20 training and 4 test samples as .npy files and return the bytes of all images."""
    images = (PICTURES * 255).astype(np.uint8)
    for part, count in (("train", 20), ("test", 4)):
        np.save(folder / f"{part}_images.npy", images[:count])
        np.save(folder / f"{part}_labels.npy", LABELS[:count])
    return images


def test_arrays_of_folder_are_memory_mapped(tmp_path: Path) -> None:
    images = write_arrays(tmp_path)
    data = load(DataPart(path=str(tmp_path)))
    assert isinstance(data.train_images, np.memmap)
    # Bytes become floats from 0 to 1 in each batch, not in the whole array.
    sample = images[[2]] / 255
    assert np.allclose(data.batch(np.array([2]), 0), sample)
    values = data.batch(np.array([2]), 0, slice(3, 9))
    assert np.allclose(values, sample.reshape(1, -1)[:, 3:9])
    assert np.allclose(unpack(pack(data)).test_batch([1]), images[[1]] / 255)


def test_held_out_samples_of_large_arrays_are_memory_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_arrays(tmp_path)
    (tmp_path / "test_images.npy").unlink()
    (tmp_path / "test_labels.npy").unlink()
    # Any array counts as large.
    monkeypatch.setattr(large, "MAX_IN_MEMORY", 0)
    data = load(DataPart(path=str(tmp_path)))
    assert isinstance(data.train_images, np.memmap)
    assert 0 < len(data.test_images) < 20
    assert len(data.train_images) + len(data.test_images) == 20
