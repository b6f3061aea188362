"""Parser of link traces, which change links and device speeds over time.

A link trace has lines of ``time,what,value``: seconds since the start of the workload, a property of a link or device,
and the new value of this property. A slowdown of 1 restores the full speed::

    0, link source->worker1 rate, 10mbit
    12.5, link source<->worker1 delay, 40ms
    13, device worker1 speed, 200mflops
    14, device worker1 slowdown, 1
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from testbed.common.errors import Diagnostic, nearest
from testbed.common.quantities import format_speed, parse_duration
from testbed.faults.device_actions import MIN_FACTOR, ThrottlePart
from testbed.faults.script import Change, traced_links
from testbed.hardware import DeviceSpec
from testbed.network import checks
from testbed.network.link import Link, Pair
from testbed.network.parts import PROPERTIES, LinkPart
from testbed.scenario.explaining import explain

# A burst has several values, but a line has one.
LINK_KEYS = tuple(name for name in PROPERTIES if name != "bursts")
"""Link properties that a trace can change."""
_DEVICE_KEYS = ("speed", "slowdown")
"""Properties of a device that a trace can change."""
# The name of the sender does not end with '-', which belongs to the arrow.
_LINK = re.compile(r"link\s+([\w-]*\w)\s*(<?->)\s*([\w-]+)\s+(\w+)")
"""``link SENDER -> RECEIVER KEY``, or with ``<->`` for both directions."""
_DEVICE = re.compile(r"device\s+([\w-]+)\s+(\w+)")
"""``device NAME KEY``."""
_NUMBER = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_MAX_PROBLEMS = 10
"""Maximum number of reported problems; a wrong trace is often wrong in every line."""

M = TypeVar("M", bound=BaseModel)


def parse(line: str) -> Change:
    """Parse one line. Raises ValueError with the problem and a remedy.

    >>> change = parse("12.5, link a<->b delay, 40ms")
    >>> change.time, change.pairs, change.link.delay
    (12.5, (('a', 'b'), ('b', 'a')), 0.04)
    """
    try:
        rows = csv.reader([line], skipinitialspace=True)
        cells = [cell.strip() for cell in chain.from_iterable(rows)]
    except csv.Error as error:
        raise ValueError(f"is not a line of CSV: {error}") from None
    if len(cells) != 3:
        raise ValueError(
            f"has {len(cells)} values: a line must be time,what,value, as in 12.5,link a->b rate,10mbit"
        )
    time_text, what, value = cells
    # Measured traces have plain seconds in their first column.
    if _NUMBER.fullmatch(time_text):
        time_text += "s"
    time = parse_duration(time_text)
    if match := _LINK.fullmatch(what):
        source, arrow, destination, key = match.groups()
        if key not in LINK_KEYS:
            raise ValueError(
                f"a trace cannot change '{key}' of a link: {nearest(key, LINK_KEYS)}"
            )
        pairs: tuple[Pair, ...] = ((source, destination),)
        if arrow == "<->":
            pairs += ((destination, source),)
        link = _validate_part(LinkPart, {key: value})
        return Change(time, what, value, pairs=pairs, link=link)
    if match := _DEVICE.fullmatch(what):
        device, key = match.groups()
        if key not in _DEVICE_KEYS:
            raise ValueError(
                f"a trace cannot change '{key}' of a device: {nearest(key, _DEVICE_KEYS)}"
            )
        throttle = _validate_part(ThrottlePart, {"device": device, key: value})
        return Change(time, what, value, speed=throttle)
    raise ValueError(
        f"'{what}' is neither a link nor a device: write 'link a->b rate' (or a<->b for both directions) "
        "or 'device a speed'"
    )


def _validate_part(model: type[M], values: Mapping[str, object]) -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ValueError(explain(error, model)[0].text) from None


def parse_trace(
    lines: Sequence[str],
    devices: Sequence[DeviceSpec],
    links: Mapping[Pair, Link],
    unknown_device_text: Callable[[str], str | None],
) -> tuple[tuple[Change, ...], list[Diagnostic]]:
    """Parse a trace; return changes and problems.

    ``unknown_device_text`` returns the error text for an unknown device, and None for a known one.
    """
    parsed: list[Change] = []
    problems: list[Diagnostic] = []

    def report(index: int, text: str) -> None:
        problems.append(Diagnostic(("trace", index), text))

    speeds = {device.name: device.speed for device in devices}
    latest = 0.0
    for index, line in enumerate(lines):
        try:
            change = parse(line)
        except ValueError as error:
            report(index, str(error))
            continue
        parsed.append(change)
        if change.time < latest:
            text = f"is out of order: {change.time:g}s is before {latest:g}s of an earlier line; sort the lines by time"
            report(index, text)
        latest = max(latest, change.time)
        for text in _change_problems(change, speeds, links, unknown_device_text):
            report(index, text)
    # Changes add up, so links are checked after each change. If a line was refused, the indices of changes differ from
    # those of lines.
    if not problems:
        # `traced_links` needs the first device for presets only, which lines cannot name.
        first_device = devices[0].name
        for index, pair, link in traced_links(links, parsed, first_device):
            for _, text in checks.problems(link):
                ends = f"from {pair[0]} to {pair[1]}"
                report(index, f"makes a link {ends} invalid: {text}")
    return tuple(parsed), _limit_problems(problems)


def _change_problems(
    change: Change,
    speeds: Mapping[str, float],
    links: Collection[Pair],
    unknown_device_text: Callable[[str], str | None],
) -> list[str]:
    """Return the error texts for unknown names or an impossible speed in a change."""
    names = set(chain.from_iterable(change.pairs))
    if change.speed is not None:
        names.add(change.speed.device)
    texts = []
    for name in sorted(names):
        text = unknown_device_text(name)
        if text is not None:
            texts.append(text)
    if texts:
        return texts
    throttle = change.speed
    if throttle is not None and throttle.speed is not None:
        minimum = speeds[throttle.device] * MIN_FACTOR
        if throttle.speed < minimum:
            text = "is less than a millionth of the device's own speed"
            return [f"{text}: use at least {format_speed(minimum)}"]
    for source, destination in change.pairs:
        # Usually both directions are missing, and one report is enough.
        if (source, destination) not in links:
            text = f"there is no link from '{source}' to '{destination}'"
            return [f"{text}: add the link, or name another one"]
    return []


def _limit_problems(problems: list[Diagnostic]) -> list[Diagnostic]:
    if len(problems) <= _MAX_PROBLEMS:
        return problems
    *shown, last = problems[:_MAX_PROBLEMS]
    omitted = len(problems) - _MAX_PROBLEMS
    return [*shown, Diagnostic(last.key, f"{last.text}; and {omitted} more like these")]
