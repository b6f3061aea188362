"""Formatting of metrics for people: three significant digits, units, and dashes for missing values."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

NONE = "–"
"""Text of a missing value."""

MetricKind = Literal["share", "seconds", "bytes", "joules", "number", "bool", "text"]
"""Kind of quantity measured by a metric; decides unit and format."""


_Units = tuple[tuple[float, str], ...]
"""Units of one kind, the largest first: factor to base units, and name."""
_SECONDS: _Units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_JOULES: _Units = ((1e3, "kJ"), (1.0, "J"))
_BYTES: _Units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def unit(kind: MetricKind, highest: float) -> tuple[float, str]:
    """Return factor and name of the unit suited to a maximum value; the name is empty for plain numbers.

    >>> unit("bytes", 25_000)
    (1000.0, 'kB')
    """
    units_of_kinds = {
        "seconds": _SECONDS,
        "bytes": _BYTES,
        "joules": _JOULES,
        "share": ((0.01, "%"),),
    }
    units = units_of_kinds.get(kind, ((1.0, ""),))
    for factor, name in units:
        if highest >= factor:
            return factor, name
    return units[-1]


@dataclass(frozen=True)
class Scale:
    """A common unit for several values of a kind, for comparison at a glance.

    >>> scale = Scale.of("seconds", [0.0873, 0.564])
    >>> scale.title("time"), scale.write(0.0873), scale.write(0.564)
    ('time (ms)', '87.3', '564')
    """

    kind: MetricKind
    factor: float
    """Size of the unit in base units."""
    unit: str
    """Name of the unit; empty for plain numbers."""

    @classmethod
    def of(cls, kind: MetricKind, values: Iterable[float | bool | str | None]) -> Scale:
        """Return the scale whose unit suits the largest of the values."""
        largest = 0.0
        for value in values:
            if isinstance(value, int | float) and not isinstance(value, bool):
                largest = max(largest, abs(value))
        return cls(kind, *unit(kind, largest))

    def title(self, name: str) -> str:
        """Return a name followed by the unit in brackets."""
        return f"{name} ({self.unit})" if self.unit else name

    def write(self, value: float | bool | str | None) -> str:
        """Format a value without the unit."""
        if value is None or isinstance(value, bool | str):
            return of_kind(self.kind, value)
        return number(value if self.factor == 1 else value / self.factor)


def _format_scaled(value: float, units: _Units) -> str:
    """Format with the largest unit in which the value, rounded to three digits, is at least one."""
    for factor, unit in units:
        # The value is rounded first, since 999.7 kB rounds to 1000 kB, which is 1 MB.
        if abs(float(f"{value:.3g}")) >= factor:
            return f"{_format_digits(value / factor)} {unit}"
    factor, unit = units[-1]
    return f"{_format_digits(value / factor)} {unit}"


def _format_digits(number: float) -> str:
    """Write three significant digits, without an exponent between 0.001 and a million."""
    if number == 0:
        return "0"
    rounded = float(f"{number:.3g}")
    if not 1e-3 <= abs(rounded) < 1e6:
        return f"{number:.3g}"
    exponent = int(f"{rounded:e}".partition("e")[2])
    places = max(0, 2 - exponent)
    text = f"{rounded:.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text


def is_visible(character: str) -> bool:
    """Return whether a terminal can print a character."""
    if character in "\n\t" or character.isprintable():
        return True
    # Python counts spaces other than U+0020, such as the no-break space, as not printable.
    return unicodedata.category(character) == "Zs"


def escape_control(text: str, max_characters: int = 2000) -> str:
    r"""Escape control characters and truncate long text for output on a terminal.

    A device's output must not move the cursor or change colours of the user's terminal.

    >>> escape_control("\x1b[31mred")
    '\\x1b[31mred'
    """
    pieces = []
    for character in text:
        if is_visible(character):
            pieces.append(character)
        else:
            # `repr` writes the escape sequence between two quotes, which are removed.
            pieces.append(repr(character)[1:-1])
    escaped = "".join(pieces)
    if len(escaped) <= max_characters:
        return escaped
    return f"{escaped[:max_characters]}... ({len(escaped) - max_characters} more characters)"


def number(value: float | None) -> str:
    """Write a plain number: whole ones in full, others with three significant digits.

    >>> number(12345), number(0.87346)
    ('12,345', '0.873')
    """
    if value is None:
        return NONE
    return f"{value:,}" if isinstance(value, int) else _format_digits(value)


def count(value: float) -> str:
    """Write a large count with a decimal prefix.

    >>> count(11_200_000)
    '11.2 M'
    """
    return _format_scaled(
        value, ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
    ).rstrip()


def seconds(value: float | None) -> str:
    """Write a duration: microseconds to minutes.

    >>> seconds(0.00213), seconds(200)
    ('2.13 ms', '3 min 20 s')
    """
    if value is None:
        return NONE
    # From here on, the value rounds to at least two minutes.
    if abs(value) >= 119.5:
        minutes, remainder = divmod(round(abs(value)), 60)
        sign = "-" if value < 0 else ""
        return f"{sign}{minutes} min {remainder} s"
    # Less than a nanosecond is a rounding error.
    if abs(value) < 1e-9:
        return "0 s"
    return _format_scaled(value, _SECONDS)


def moment(value: float | None) -> str:
    """Write an instant of the run, to the hundredth of a second."""
    return NONE if value is None else f"{value:.2f} s"


def size(value: float | None) -> str:
    """Write bytes, with decimal prefixes.

    >>> size(999_700)
    '1 MB'
    """
    if value is None:
        return NONE
    return _format_scaled(value, _BYTES) if value else "0 B"


def joules(value: float | None) -> str:
    """Write an energy."""
    return NONE if value is None else _format_scaled(value, _JOULES)


def rate(value: float | None) -> str:
    """Format bit/s; None is ``unlimited``.

    >>> rate(50e6)
    '50 mbit'
    """
    if value is None:
        return "unlimited"
    return _format_scaled(
        value, ((1e9, "gbit"), (1e6, "mbit"), (1e3, "kbit"), (1.0, "bit"))
    )


def speed(value: float) -> str:
    """Write FLOP/s."""
    return _format_scaled(
        value,
        (
            (1e12, "TFLOP/s"),
            (1e9, "GFLOP/s"),
            (1e6, "MFLOP/s"),
            (1e3, "kFLOP/s"),
            (1.0, "FLOP/s"),
        ),
    )


def share(value: float | None) -> str:
    """Write a fraction as per cent, with ``<`` for a small one, and two decimal places for one just below 1.

    >>> share(0.0004), share(0.987), share(0.9999)
    ('<0.1%', '98.7%', '99.99%')
    """
    if value is None:
        return NONE
    percent = value * 100
    if 0 < percent < 0.1:
        return "<0.1%"
    if percent < 99.95:
        return f"{percent:.1f}%"
    if percent < 100:
        return f"{percent:.2f}%"
    return f"{percent:.0f}%"


def whole_share(value: float) -> str:
    """Write a fraction as whole per cent."""
    return "<1%" if 0 < value < 0.005 else f"{value * 100:.0f}%"


def of_kind(kind: MetricKind, value: float | bool | str | None) -> str:
    """Format a metric of the given kind.

    >>> of_kind("share", 0.914), of_kind("bool", True)
    ('91.4%', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    writers = {"seconds": seconds, "bytes": size, "joules": joules, "share": share}
    return writers.get(kind, number)(value)


def ratio(value: float | None) -> str:
    """Write a quotient of two values of a metric.

    >>> ratio(1.237)
    '1.24×'
    """
    if value is None:
        return NONE
    # Two decimal places would show 0.0012 as 0.00. Below a millionth, 0.00 is the right text.
    if 1e-6 < abs(value) < 0.1:
        return f"{_format_digits(float(f'{value:.2g}'))}×"
    return f"{value:.2f}×"
