"""Storage of measurements by revision, and their comparison."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from testbed_controller.results.recorder import revision
from tools.bench import history
from tools.bench.measurement import Measurement


def test_later_measurements_replace_those_of_same_name(
    tmp_path: Path,
) -> None:
    file = tmp_path / "results/bench.json"
    first = [Measurement("start-up", 9.0, "s"), Measurement("rate", 50.0, "1/s")]
    second = [Measurement("start-up", 8.0, "s")]
    history.store_measurements(first, file)
    history.store_measurements(second, file)
    # Outside of a repository, the revision is "unknown".
    abbreviated = (revision() or "unknown")[:7]
    measurements = history.measurements_of_revision(abbreviated, file)
    assert measurements == {"start-up": 8.0, "rate": 50.0}


def test_unknown_revision_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "results/bench.json"
    history.store_measurements([Measurement("start-up", 9.0, "s")], file)
    with pytest.raises(click.UsageError, match="0 revisions beginning with 'nothing'"):
        history.measurements_of_revision("nothing", file)


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
    # Ratios to 8.0. A lower value is better with `at_most`, and a higher one otherwise.
    measurement = Measurement("x", value, "", at_most=at_most)
    assert history.compare_measurement(measurement, {"x": 8.0}) == expected


def test_measurement_without_a_counterpart_has_no_ratio() -> None:
    measurement = Measurement("new", 1.0, "s")
    assert history.compare_measurement(measurement, {"x": 8.0}) == ("", False)
