"""Measurements of the bench, stored by revision."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from testbed_controller.results.recorder import revision
from tools.bench import kept
from tools.bench.measurement import Measurement


def test_newest_measurement_of_an_abbreviated_revision_is_read(
    tmp_path: Path,
) -> None:
    file = tmp_path / "results/bench.json"
    kept.store_measurements(
        [Measurement("start-up", 9.0, "s"), Measurement("rate", 50.0, "1/s")], file
    )
    kept.store_measurements([Measurement("start-up", 8.0, "s")], file)
    measurements = kept.measurements_of_revision((revision() or "unknown")[:7], file)
    assert measurements == {"start-up": 8.0, "rate": 50.0}
    with pytest.raises(click.UsageError, match="0 revisions 'nothing'"):
        kept.measurements_of_revision("nothing", file)


@pytest.mark.parametrize(
    ("value", "at_most", "expected"),
    [
        (8.5, True, ("1.06×", False)),
        (9.0, True, ("1.12×", True)),
        (7.0, False, ("0.88×", True)),
        (9.0, False, ("1.12×", False)),
    ],
)
def test_value_more_than_a_tenth_worse_is_marked(
    value: float, at_most: bool, expected: tuple[str, bool]
) -> None:
    assert (
        kept.compare_measurement(
            Measurement("x", value, "", at_most=at_most), {"x": 8.0}
        )
        == expected
    )


def test_measurement_without_a_counterpart_has_no_ratio() -> None:
    assert kept.compare_measurement(Measurement("new", 1.0, "s"), {"x": 8.0}) == (
        "",
        False,
    )
