"""Parser of link traces, lines of ``time,what,value`` that change links and device speeds over time.

0, link source->worker1 rate, 10mbit
12.5, link source<->worker1 delay, 40ms
13, device worker1 speed, 200mflops
14, device worker1 slowdown, 1
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from testbed.common.errors import Diagnostic, Key, nearest
from testbed.common.quantities import parse_duration
from testbed.faults.device_actions import MIN_FACTOR, ThrottlePart
from testbed.faults.script import Change, traced_links
from testbed.hardware import DeviceSpec
from testbed.network import checks
from testbed.network.link import Link, Pair
from testbed.network.parts import FIGURES, LinkPart
from testbed.scenario.explaining import explain

KEYS = tuple(name for name in FIGURES if name != "bursts")
"""Link properties that a trace can change."""
_SPEEDS = ("speed", "slowdown")
_LINK = re.compile(r"link\s+([\w-]*[\w])\s*(<?->)\s*([\w-]+)\s+(\w+)")
_DEVICE = re.compile(r"device\s+([\w-]+)\s+(\w+)")
_NUMBER = re.compile(r"\d+\.?\d*|\.\d+")
_MOST_PROBLEMS = 10
"""Maximum number of reported problems; a wrong trace is often wrong in every line."""

M = TypeVar("M", bound=BaseModel)


def parse(line: str) -> Change:
    """Parse one line. Raises ValueError with the problem and a remedy."""
    try:
        cells = [
            cell.strip() for cell in next(csv.reader([line], skipinitialspace=True), [])
        ]
    except csv.Error as error:
        raise ValueError(f"is not a line of CSV: {error}") from None
    if len(cells) != 3:
        raise ValueError(
            f"has {len(cells)} values: a line must be time,what,value, as in 12.5,link a->b rate,10mbit"
        )
    written, what, value = cells
    time = float(written) if _NUMBER.fullmatch(written) else parse_duration(written)
    if match := _LINK.fullmatch(what):
        source, arrow, target, key = match.groups()
        if key not in KEYS:
            raise ValueError(
                f"a trace cannot change '{key}' of a link: {nearest(key, KEYS)}"
            )
        pairs = (
            ((source, target),)
            if arrow == "->"
            else ((source, target), (target, source))
        )
        return Change(time, what, value, pairs, _validate_part(LinkPart, {key: value}))
    if match := _DEVICE.fullmatch(what):
        device, key = match.groups()
        if key not in _SPEEDS:
            raise ValueError(
                f"a trace cannot change '{key}' of a device: {nearest(key, _SPEEDS)}"
            )
        return Change(
            time,
            what,
            value,
            speed=_validate_part(ThrottlePart, {"device": device, key: value}),
        )
    raise ValueError(
        f"'{what}' is neither a link nor a device: write 'link a->b rate' (or a<->b for both directions) "
        "or 'device a speed'"
    )


def _validate_part(model: type[M], values: Mapping[str, object]) -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ValueError(explain(error, model)[0].text) from None


def changes(
    lines: Sequence[str],
    devices: Sequence[DeviceSpec],
    links: Mapping[Pair, Link],
    no_such_device: Callable[[str], str | None],
) -> tuple[tuple[Change, ...], list[Diagnostic]]:
    """Parse a trace; return changes and problems. ``no_such_device`` returns the error text for an unknown name."""
    parsed: list[Change] = []
    problems: list[Diagnostic] = []

    def wrong(index: int, text: str) -> None:
        problems.append(Diagnostic(("trace", index), text))

    own = {device.name: device.speed for device in devices}
    read: dict[int, Change] = {}
    latest = 0.0
    for index, line in enumerate(lines):
        try:
            change = read[index] = parse(line)
        except ValueError as error:
            wrong(index, str(error))
            continue
        if change.time < latest:
            text = f"runs backwards: {change.time:g}s is before the {latest:g}s of a line above: sort the lines by time"
            wrong(index, text)
        latest = max(latest, change.time)
        for text in _unknown_names(change, own, links, no_such_device):
            wrong(index, text)
    parsed = list(read.values())
    if not problems:
        for index, pair, link in traced_links(links, parsed, next(iter(own))):
            for _, text in checks.problems(link):
                wrong(
                    index,
                    f"makes a link from {pair[0]} to {pair[1]} with an impossible property: {text}",
                )
    return tuple(parsed), _limit_problems(problems)


def _unknown_names(
    change: Change,
    own: Mapping[str, float],
    links: Collection[Pair],
    no_such_device: Callable[[str], str | None],
) -> list[str]:
    """Return the error text for unknown names or an impossible speed in a change."""
    names = {name for pair in change.pairs for name in pair} | (
        {change.speed.device} if change.speed else set()
    )
    texts = [
        text for name in sorted(names) if (text := no_such_device(name)) is not None
    ]
    if texts:
        return texts
    if (
        change.speed is not None
        and change.speed.slowed(1.0, own[change.speed.device]) < MIN_FACTOR
    ):
        return ["is less than a millionth of the device's own speed: use more"]
    return [
        f"there is no link from '{pair[0]}' to '{pair[1]}'"
        for pair in change.pairs
        if pair not in links
    ][:1]


def _limit_problems(problems: list[Diagnostic]) -> list[Diagnostic]:
    if len(problems) <= _MOST_PROBLEMS:
        return problems
    last = problems[_MOST_PROBLEMS - 1]
    key: Key = last.key
    more = f"{last.text}; and {len(problems) - _MOST_PROBLEMS} more like these"
    return [*problems[: _MOST_PROBLEMS - 1], Diagnostic(key, more)]
