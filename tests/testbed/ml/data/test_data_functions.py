"""Functions in users' files that return training and test data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from testbed.common.errors import InputError
from testbed.ml.data import load
from testbed.ml.data.dataset import Dataset
from testbed.ml.workload import DataPart

FUNCTIONS = """\
import numpy as np, torch, sys
from PIL import Image
from torch.utils.data import TensorDataset
X, Y = np.zeros((4, 1, 2, 2), dtype='float32'), np.arange(4) % 2
def no_tests(): return (X, Y), None
def gradients(): return (torch.from_numpy(X).requires_grad_(), Y), (X, Y)
def two_pairs(): return [(X[0], 0), (X[1], 1)], (X, Y)
def pictures(): return [(Image.new('RGB', (6, 4)), 0)], [(Image.new('RGB', (6, 4)), 0)]
def ragged(): return [(X[0], 0), (X[0][:, :1], 1)], (X, Y)
def half(): return (torch.zeros(2, 3).bfloat16(), Y[:2]), (X, Y)
def leaves(): sys.exit(3)
def wrong(): return 1
def nothing(): return [], None
def broken(): return 1 / 0
def data_set():
    images, labels = torch.rand(8, 5), torch.arange(8) % 2
    return TensorDataset(images, labels), (images, labels)
"""


def call_function(folder: Path, name: str) -> Dataset:
    file = folder / "mine.py"
    file.write_text(FUNCTIONS)
    return load(DataPart(file="mine.py", name=name), file)


def test_function_may_return_torch_data_set_and_tensors(tmp_path: Path) -> None:
    data = call_function(tmp_path, "data_set")
    assert data.shape == (5,)
    assert data.classes == 2
    assert len(data.train_labels) == 8
    assert np.array_equal(data.train_images, data.test_images)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        ("no_tests", (1, 2, 2)),
        ("gradients", (1, 2, 2)),
        ("two_pairs", (1, 2, 2)),
        ("pictures", (3, 4, 6)),
    ],
)
def test_function_result_is_accepted(
    tmp_path: Path, function: str, shape: tuple[int, ...]
) -> None:
    assert call_function(tmp_path, function).shape == shape


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("ragged", "samples of one shape"),
        ("half", "must be arrays"),
        ("wrong", r"wrong returned int: return \(train, test\)"),
        ("leaves", "mine.py:11: SystemExit: 3"),
        ("broken", "mine.py:14: ZeroDivisionError"),
        ("nothing", "mine.py: nothing: .*: the sequence has no samples"),
        ("none", "available: no_tests, .*, wrong, nothing, broken, data_set"),
    ],
)
def test_unsuitable_function_is_rejected(
    tmp_path: Path, function: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        call_function(tmp_path, function)
