"""Tests of options of synchronous pipelines."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from testbed.ml.pipeline.planning import SynchronousOptions


@pytest.mark.parametrize(
    ("options", "micro_batches"),
    [
        ({}, 4),
        # Without pipelining, micro-batches would only add overhead.
        ({"schedule": "model-parallelism"}, 1),
        ({"schedule": "gpipe", "micro_batches": None}, 4),
        ({"schedule": "model-parallelism", "micro_batches": 7}, 7),
    ],
)
def test_default_number_of_micro_batches_depends_on_schedule(
    options, micro_batches: int
) -> None:
    assert SynchronousOptions(**options).micro_batches == micro_batches


def test_unknown_schedule_is_reported_without_further_errors() -> None:
    with pytest.raises(ValidationError) as raised:
        SynchronousOptions(schedule="3f1b")
    (error,) = raised.value.errors()
    assert error["loc"] == ("schedule",)
