from __future__ import annotations

import pytest
from pydantic import ValidationError

from testbed.ml.pipeline.planning import SynchronousOptions


@pytest.mark.parametrize(
    ("options", "micro_batches"),
    [
        ({}, 4),
        ({"schedule": "model-parallelism"}, 1),
        ({"schedule": "gpipe", "micro_batches": None}, 4),
        ({"schedule": "model-parallelism", "micro_batches": 7}, 7),
    ],
)
def test_micro_batches_default_to_those_of_the_schedule(
    options, micro_batches: int
) -> None:
    assert SynchronousOptions(**options).micro_batches == micro_batches


def test_an_unknown_schedule_is_the_only_mistake() -> None:
    with pytest.raises(ValidationError) as raised:
        SynchronousOptions(schedule="3f1b")
    assert [each["loc"] for each in raised.value.errors()] == [("schedule",)]
