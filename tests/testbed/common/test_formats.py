"""Numbers formatted as text with units and at most three significant digits."""

from __future__ import annotations

import pytest

from testbed.common import formats
from testbed.trace.registry import COMMON
from testbed_controller.report.declared import format_metric


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (0.0234, "23.4 ms"),
        (0.9999, "1 s"),
        (12.345, "12.3 s"),
        (150.0, "2 min 30 s"),
        (3e-6, "3 µs"),
        (None, "–"),
    ],
)
def test_seconds_are_formatted_with_fitting_unit(
    value: float | None, text: str
) -> None:
    assert formats.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1500, "1.5 kB"), (999_900, "1 MB"), (2.5e9, "2.5 GB"), (12, "12 B")],
)
def test_size_is_formatted_with_fitting_unit(value: float, text: str) -> None:
    assert formats.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0%"),
        # Shares near 0 and 1 must differ from 0 and 1 themselves.
        (0.0004, "<0.1%"),
        (0.5, "50.0%"),
        (0.9999, "99.99%"),
        (1.0, "100%"),
    ],
)
def test_share_is_formatted_as_percentage(value: float, text: str) -> None:
    assert formats.share(value) == text


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("step_time", 0.25, "250 ms"),
        ("accuracy", 0.5, "50.0%"),
        ("trusted", True, "yes"),
        ("devices.a.bytes_sent", 1e6, "1 MB"),
        ("recoveries", 1, "1"),
        ("loss", 0.0123456, "0.0123"),
    ],
)
def test_metric_of_all_runs_is_formatted_by_its_kind(
    metric: str, value: float, text: str
) -> None:
    # The registry `COMMON` has the kind of each metric, such as a duration or a share.
    assert format_metric(metric, value, COMMON) == text


def test_rate_has_unit_of_scenarios_or_is_unlimited() -> None:
    assert formats.rate(None) == "unlimited"
    assert formats.rate(49.87e6) == "49.9 mbit"


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.5 J"), (12.0, "12 J"), (4500.0, "4.5 kJ")]
)
def test_energy_is_formatted_in_joules(value: float, text: str) -> None:
    # The unit of a metric is its kind.
    assert formats.of_kind("joules", value) == text


def test_values_of_scale_have_unit_of_largest_value() -> None:
    scale = formats.Scale.of("seconds", [0.873, 5.64, None])
    assert scale.title("time") == "time (s)"
    # On its own, the first value would be 873 ms.
    assert scale.write(0.873) == "0.873"
    assert scale.write(5.64) == "5.64"
    assert scale.write(None) == "–"
