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
def test_seconds(value: float | None, text: str) -> None:
    assert formats.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1500, "1.5 kB"), (999_900, "1 MB"), (2.5e9, "2.5 GB"), (12, "12 B")],
)
def test_size(value: float, text: str) -> None:
    assert formats.size(value) == text


def test_shares_keep_apart_a_little_and_nothing() -> None:
    assert [formats.share(value) for value in (0.0, 0.0004, 0.5, 0.9999, 1.0)] == [
        "0.0%",
        "<0.1%",
        "50.0%",
        "99.99%",
        "100%",
    ]


def test_figures_are_written_as_their_kind() -> None:
    assert format_metric("step_time", 0.25, COMMON) == "250 ms"
    assert format_metric("accuracy", 0.5, COMMON) == "50.0%"
    assert format_metric("trusted", True, COMMON) == "yes"
    assert format_metric("devices.a.bytes_sent", 1e6, COMMON) == "1 MB"
    assert format_metric("recoveries", 1, COMMON) == "1"
    assert format_metric("loss", 0.0123456, COMMON) == "0.0123"
    assert formats.rate(None) == "unlimited"
    assert formats.rate(49.87e6) == "49.9 mbit"


def test_energy_has_a_unit() -> None:
    assert [formats.of_kind("joules", value) for value in (0.5, 12.0, 4500.0)] == [
        "0.5 J",
        "12 J",
        "4.5 kJ",
    ]


def test_values_of_one_scale_share_the_unit_of_the_largest() -> None:
    scale = formats.Scale.of("seconds", [0.873, 5.64, None])
    assert scale.title("time") == "time (s)"
    assert [scale.write(value) for value in (0.873, 5.64, None)] == [
        "0.873",
        "5.64",
        "–",
    ]
