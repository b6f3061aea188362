"""Quantities with units: parsers, formatters and pydantic types of rates, durations, fractions, sizes, speeds.

A quantity is text such as ``50mbit``, ``5ms``, ``1%``, ``1GiB``, ``3.6gflops`` or ``4.4GB/s``. A number without a unit
is refused (except ``0``), because users would expect different units. Parsed quantities are floats in base units:
bit/s, seconds, fractions of one, FLOP/s, bytes/s; sizes are whole bytes. A kind is one of these six.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from annotated_types import Le
from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_NUMBER_AND_UNIT = re.compile(
    r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\s\d].*)?\Z"
)

MAX_VALUE = 1e18
"""Maximum of any quantity except a fraction, in base units."""

RATE_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
SIZE_UNITS = {
    "B": 1.0,
    "kB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
}
BYTE_RATE_UNITS = {f"{unit}/s": factor for unit, factor in SIZE_UNITS.items()}
SPEED_UNITS = {
    "flops": 1.0,
    "kflops": 1e3,
    "mflops": 1e6,
    "gflops": 1e9,
    "tflops": 1e12,
}
FRACTION_UNITS = {"%": 0.01}
_UNITS_OF_KINDS = (
    RATE_UNITS,
    DURATION_UNITS,
    FRACTION_UNITS,
    SIZE_UNITS,
    SPEED_UNITS,
    BYTE_RATE_UNITS,
)

# Rates in other notations, for suggestions. A capital B means bytes and a small b bits; only `bps` is ambiguous. Upper
# and lower case of prefixes are equal, as in tc.
_BYTE_RATE = re.compile(r"([kKmMgG]?)(?:Bps|B/s|B)")
_TC_BYTE_RATE = re.compile(r"([kKmMgG]?)(?:bps|BPS)")
_BIT_RATE = re.compile(r"([kKmMgG]?)(?:(?i:bits?(?:/s)?)|b/s|b)")
# The message puts a suggestion in quotes, so a text with two suggestions contains the quotes between them.
_LIKELY_UNITS = {
    "duration": {
        "sec": "s",
        "second": "s",
        "seconds": "s",
        "m": "min",
        "minutes": "min",
        "usec": "us",
        "msec": "ms",
    },
    "size": {
        "K": "kB' or 'KiB",
        "k": "kB' or 'KiB",
        "M": "MB' or 'MiB",
        "G": "GB' or 'GiB",
    },
    "speed": {"flop/s": "flops", "GFLOP/s": "gflops"},
}
"""Frequent wrong unit -> suggested unit, by kind."""


def _suggest_unit(
    kind: str, number: float, unit: str, units: Mapping[str, float]
) -> str:
    """Return a suggestion for an unknown unit, as the end of an error text."""
    if kind == "rate":
        # tc reads `bps` as bytes a second, most people as bits a second.
        if match := _TC_BYTE_RATE.fullmatch(unit):
            return f"tc reads '{unit}' as bytes a second, most people mean bits: write '{match[1].lower()}bit'"
        if match := _BYTE_RATE.fullmatch(unit):
            return f"a link's rate is in bits a second: write '{8 * number:.15g}{match[1].lower()}bit'"
        if match := _BIT_RATE.fullmatch(unit):
            return f"write '{match[1].lower()}bit', which means bits a second"
    if unit in _LIKELY_UNITS.get(kind, {}):
        return f"write '{_LIKELY_UNITS[kind][unit]}'"
    for candidate in units:
        if candidate.lower() == unit.lower():
            return f"write '{candidate}'"
    return f"a {kind} is in " + ", ".join(units)


def _split_unit(text: str) -> tuple[float, str] | None:
    """Return the number and the unit (maybe empty) of a quantity; None for other text."""
    match = _NUMBER_AND_UNIT.match(" ".join(text.split()))
    return None if match is None else (float(match[1]), match[2] or "")


def _parse_quantity(
    kind: str,
    value: object,
    units: Mapping[str, float],
    example: str,
    maximum: float = MAX_VALUE,
) -> float:
    """Return a quantity in base units. Raises ValueError, which names the ``kind`` and may show an ``example``."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"a {kind} is text with a unit, such as '{example}'")
    text = " ".join(str(value).split())
    quantity = _split_unit(text)
    if quantity is None:
        raise ValueError(
            f"'{text}' is not a {kind}: write a number and a unit, such as '{example}'"
        )
    number, unit = quantity
    if number < 0:
        raise ValueError(f"'{text}' is negative, which no {kind} can be")
    if not unit:
        if number == 0:
            return 0.0
        text = f"'{text}' has no unit: a {kind} is written like '{example}'"
        # A bare number up to 1 is most likely meant as a fraction of one.
        if kind == "fraction" and number <= 1:
            suggestion = f"{100 * number:g}%"
            # The text already ends with the example.
            if suggestion != example:
                text += f", so write '{suggestion}'"
        raise ValueError(text)
    if unit not in units:
        raise ValueError(
            f"'{unit}' is not a unit of {kind}: {_suggest_unit(kind, number, unit, units)}"
        )
    converted = number * units[unit]
    # A number too large for a float is infinite, so it is refused here, too.
    if converted > maximum:
        limit = f"{maximum:g} {_base_unit(units)}"
        raise ValueError(f"'{text}' is too large for a {kind}: it is at most {limit}")
    return converted


def on_one_scale(values: Sequence[object]) -> tuple[list[float], str] | None:
    """Convert values to numbers in a common unit, for the axis of a chart: the largest unit used, empty for numbers.

    Returns None unless all values are numbers, or quantities of one kind of which at least one has a unit.

    >>> on_one_scale(["500kbit", "2mbit"])
    ([0.5, 2.0], 'mbit')
    """
    if all(
        isinstance(value, int | float) and not isinstance(value, bool)
        for value in values
    ):
        # float(10**400) raises OverflowError, but float(str(10**400)) is infinity.
        return [float(str(value)) for value in values], ""
    quantities: list[tuple[float, str]] = []
    for value in values:
        quantity = _split_unit(str(value))
        if quantity is None:
            return None
        quantities.append(quantity)
    # A zero without a unit can have any unit.
    used_units = {unit for number, unit in quantities if unit or number != 0}
    for units in _UNITS_OF_KINDS:
        if used_units and used_units <= units.keys():
            largest_unit = max(used_units, key=units.__getitem__)
            scaled = []
            for number, unit in quantities:
                scaled.append(number * units.get(unit, 1.0) / units[largest_unit])
            return scaled, largest_unit
    return None


parse_rate = partial(_parse_quantity, "rate", units=RATE_UNITS, example="50mbit")
"""Return bit/s from text like ``50mbit``; raise ValueError with a hint for ``50Mbps``."""
parse_duration = partial(
    _parse_quantity, "duration", units=DURATION_UNITS, example="5ms"
)
"""Return seconds from text like ``5ms``."""
parse_speed = partial(_parse_quantity, "speed", units=SPEED_UNITS, example="3.6gflops")
"""Return FLOP/s (a multiply and an add are two) from text like ``3.6gflops``."""
parse_byte_rate = partial(
    _parse_quantity, "byte rate", units=BYTE_RATE_UNITS, example="4.4GB/s"
)
"""Return bytes/s (of memory) from text like ``4.4GB/s``."""


def parse_size(value: object) -> int:
    """Return bytes from text like ``1GiB``, rounded to a whole number.

    >>> parse_size("1.5kB")
    1500
    """
    return round(_parse_quantity("size", value, SIZE_UNITS, "512MiB"))


def parse_fraction(value: object) -> float:
    """Return a fraction of one from text like ``1%``. Raises ValueError with a suggestion.

    >>> parse_fraction("5%")
    0.05
    """
    fraction = _parse_quantity("fraction", value, FRACTION_UNITS, "1%", math.inf)
    if fraction > 1:
        raise ValueError(f"'{value}' is more than 100%: write at most 100%")
    return fraction


def _base_unit(units: Mapping[str, float]) -> str:
    """Return the unit whose factor is closest to 1: the base unit, or per cent."""
    return min(units, key=lambda unit: abs(units[unit] - 1))


def _format_quantity(value: float, units: Mapping[str, float]) -> str:
    """Return the shortest text parsing to the same float, with a number of at least 1 if possible.

    A percentage with more than 15 digits may parse to a neighbouring float.
    """
    if value == 0:
        return "0"
    exact: list[tuple[int, bool, str]] = []
    for unit, factor in units.items():
        number = value / factor
        # Six digits are the easiest to read, 15 hide the rounding error of the division, and repr has all digits.
        for digits in (f"{number:g}", f"{number:.15g}", f"{number!r}"):
            if float(digits) * factor == value:
                text = digits + unit
                is_below_one = value < factor
                exact.append((len(text), is_below_one, text))
    if exact:
        # Ordered by length, then numbers of at least 1 first, then by alphabet.
        return min(exact)[-1]
    # Only per cent arrives here, as the other kinds have a unit of factor 1.
    base = _base_unit(units)
    return f"{value / units[base]!r}{base}"


format_rate = partial(_format_quantity, units=RATE_UNITS)
"""Format bit/s with a unit."""
format_duration = partial(_format_quantity, units=DURATION_UNITS)
"""Format seconds with a unit."""
format_size = partial(_format_quantity, units=SIZE_UNITS)
"""Format bytes with a unit."""
format_speed = partial(_format_quantity, units=SPEED_UNITS)
"""Format FLOP/s with a unit."""
format_byte_rate = partial(_format_quantity, units=BYTE_RATE_UNITS)
"""Format bytes/s with a unit."""
format_fraction = partial(_format_quantity, units=FRACTION_UNITS)
"""Format a fraction of one as per cent."""


def _annotated_type(
    parse: Callable[[object], float],
    format_text: Callable[[float], str],
    example: str,
) -> Any:
    """Combine parser, formatter and JSON schema of one kind of quantity into a pydantic annotation."""
    schema = {"anyOf": [{"type": "string"}, {"const": 0}], "examples": [example]}
    return (
        # The parser refuses larger values itself. Without a bound in the type, `testbed.common.part` would add that of
        # plain numbers, which would refuse 10tflops.
        Le(MAX_VALUE),
        BeforeValidator(parse),
        PlainSerializer(format_text),
        WithJsonSchema(schema),
    )


Rate = Annotated[float, *_annotated_type(parse_rate, format_rate, "50mbit")]
Duration = Annotated[float, *_annotated_type(parse_duration, format_duration, "5ms")]
Fraction = Annotated[float, *_annotated_type(parse_fraction, format_fraction, "1%")]
Size = Annotated[float, *_annotated_type(parse_size, format_size, "1GiB")]
ByteRate = Annotated[
    float, *_annotated_type(parse_byte_rate, format_byte_rate, "4.4GB/s")
]
Speed = Annotated[float, *_annotated_type(parse_speed, format_speed, "3.6gflops")]
