"""Parsing and formatting of quantities with units."""

from __future__ import annotations

import math
import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from testbed.common import quantities as q
from testbed.common.part import ConfigModel

KINDS = {
    "rate": (q.parse_rate, q.format_rate, q.RATE_UNITS),
    "duration": (q.parse_duration, q.format_duration, q.DURATION_UNITS),
    "size": (q.parse_size, q.format_size, q.SIZE_UNITS),
    "speed": (q.parse_speed, q.format_speed, q.SPEED_UNITS),
    "fraction": (q.parse_fraction, q.format_fraction, q.FRACTION_UNITS),
}


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (q.parse_rate, "50mbit", 50e6),
        (q.parse_rate, "250 kbit", 250e3),
        (q.parse_rate, "1.5gbit", 1.5e9),
        (q.parse_duration, "5ms", 0.005),
        (q.parse_duration, "2min", 120.0),
        (q.parse_duration, "1e-3s", 0.001),
        (q.parse_duration, 0, 0.0),
        (q.parse_duration, 0.0, 0.0),
        (q.parse_size, "1GiB", 2**30),
        (q.parse_size, "1GB", 10**9),
        (q.parse_size, "1.5KiB", 1536),
        (q.parse_fraction, "1%", 0.01),
        (q.parse_fraction, "100%", 1.0),
        (q.parse_speed, "3.6gflops", 3.6e9),
    ],
)
def test_number_with_unit_is_parsed(parse, text, value):
    assert parse(text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (q.parse_rate, "100Mbps", "write 'mbit'"),
        (q.parse_rate, "100Mbps", "bytes a second"),
        (q.parse_rate, "100kbps", "write 'kbit'"),
        (q.parse_rate, "100bps", "write 'bit'"),
        (q.parse_rate, "100MBps", "write '800mbit'"),
        (q.parse_rate, "100MB/s", "write '800mbit'"),
        (q.parse_rate, "100MB", "write '800mbit'"),
        (q.parse_rate, "100mB/s", "write '800mbit'"),
        (q.parse_rate, "1234567MB/s", "write '9876536mbit'"),
        (q.parse_rate, "50mbps", "tc reads 'mbps' as bytes a second"),
        (q.parse_rate, "1gbps", "write 'gbit'"),
        (q.parse_rate, "1GBPS", "write 'gbit'"),
        (q.parse_rate, "100Mb", "write 'mbit', which means bits"),
        (q.parse_rate, "100MBIT/S", "write 'mbit', which means bits"),
        (q.parse_rate, "100Mbit", "write 'mbit'"),
        (q.parse_rate, "100Mbit/s", "write 'mbit'"),
        (q.parse_rate, "100Gb/s", "write 'gbit'"),
        (q.parse_rate, "100", "has no unit: a rate is written like '50mbit'"),
        (q.parse_rate, 100, "has no unit"),
        (q.parse_rate, 1.5, "has no unit"),
        (q.parse_rate, "fast", "write a number and a unit"),
        (q.parse_rate, "", "write a number and a unit"),
        (q.parse_rate, "1e999mbit", "too large"),
        (q.parse_rate, [5], "text with a unit"),
        (q.parse_rate, True, "text with a unit"),
        (q.parse_duration, "5 MS", "write 'ms'"),
        (q.parse_duration, "5sec", "write 's'"),
        (q.parse_duration, "-5ms", "negative"),
        (q.parse_duration, "5m", "write 'min'"),
        (q.parse_size, "1gib", "write 'GiB'"),
        (q.parse_size, "1G", "write 'GB' or 'GiB'"),
        (q.parse_size, "1Mbit", "a size is in B, kB"),
        (q.parse_fraction, "101%", "more than 100%"),
        (q.parse_fraction, "1e30%", "write at most 100%"),
        (q.parse_fraction, "1e999%", "write at most 100%"),
        (q.parse_fraction, "0.5", "write '50%'"),
        (q.parse_fraction, 0.5, "write '50%'"),
        (q.parse_speed, "4GFLOPS", "write 'gflops'"),
    ],
)
def test_invalid_quantity_is_refused_with_suggestion(parse, text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(text)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_formatted_quantity_is_parsed_to_same_value(kind, data):
    parse, format_quantity, _ = KINDS[kind]
    if kind == "size":
        # Bytes are whole numbers.
        values = st.integers(0, 10**15)
    else:
        maximum = 1.0 if kind == "fraction" else 1e15
        values = st.floats(0, maximum, allow_subnormal=False)
    value = data.draw(values)
    assert parse(format_quantity(value)) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("kind", KINDS)
@given(number=st.decimals(0, 1, places=6), data=st.data())
def test_number_is_multiplied_by_unit(kind, number, data):
    parse, _, units = KINDS[kind]
    unit = data.draw(st.sampled_from(sorted(units)))
    # Sizes are rounded to bytes.
    tolerance = 0.5 if kind == "size" else 1e-12
    expected = float(number) * units[unit]
    assert parse(f"{number}{unit}") == pytest.approx(expected, abs=tolerance)


@given(
    st.one_of(
        st.text(),
        st.text(string.printable),
        st.floats(),
        st.integers(),
        st.none(),
        st.lists(st.integers()),
    )
)
def test_random_value_is_parsed_or_refused_in_one_line(value):
    for parse, _, _ in KINDS.values():
        try:
            result = parse(value)
        except ValueError as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017 - some random values are quantities
        else:
            assert math.isfinite(result)
            assert result >= 0


def test_common_scale_ignores_blanks_around_quantities():
    assert q.on_one_scale([" 2mbit ", "500 kbit", "0"]) == ([2.0, 0.5, 0.0], "mbit")


class Board(ConfigModel):
    speed: q.Speed
    memory: q.Size


def test_quantity_may_exceed_bound_of_plain_numbers():
    board = Board.model_validate({"speed": "1000tflops", "memory": "4000GB"})
    assert (board.speed, board.memory) == (1e15, 4e12)


def test_quantity_above_own_bound_is_refused():
    with pytest.raises(ValidationError, match="too large for a speed"):
        Board.model_validate({"speed": "1e9tflops", "memory": "1GB"})
