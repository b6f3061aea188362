"""Data sets of Hugging Face."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.common.errors import InputError
from testbed.ml.data import load
from testbed.ml.workload import DataPart


def test_hugging_face_data_set_is_read_from_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra `datasets`")
    path = str(tmp_path / "set")
    rows = {
        "input_ids": [[1, 2], [3, 4, 5], [6]],
        "attention_mask": [[1, 1], [1, 1, 1], [1]],
        "label": [0, 1, 0],
    }
    part = datasets.Dataset.from_dict(rows)
    datasets.DatasetDict(train=part, test=part).save_to_disk(path)
    data = load(DataPart(path=path))
    assert [field.name for field in data.fields] == ["input_ids", "attention_mask"]
    # Both inputs are padded to the three values of the longest sample.
    assert data.train_images.tolist()[0] == [1, 2, 0, 1, 1, 0]
    assert data.train_labels.tolist() == [0, 1, 0]
    one_input = load(DataPart(path=path, columns=["input_ids"], label="label"))
    assert one_input.shape == (3,)
    with pytest.raises(InputError, match="has no column nothing"):
        load(DataPart(path=path, columns=["nothing"]))
