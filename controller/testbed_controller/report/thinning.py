"""Selection of notable devices, links or rows for pages of large runs.

A page shows those that stand out by some measure, with the reason, and names the file with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from heapq import nlargest
from itertools import islice
from typing import Any, TypeVar

from testbed_controller.report.tables import Section

MOST = 400
"""Maximum number of devices, links, rows or list entries on a page without selection."""
EACH = 10
"""Number of devices or links selected by each metric, and of entries kept of a longer list."""
Item = TypeVar("Item")


def standing_out(
    items: Sequence[Item], by: Mapping[str, Callable[[Item], float]]
) -> list[tuple[Item, str]]:
    """Return the selected items, each with the reason for its selection.

    Up to `MOST` items are all returned without reasons. Of more, those with the largest positive value of each metric
    are selected; of equal items, the first ones.
    """
    if len(items) <= MOST:
        return [(item, "") for item in items]
    reasons: dict[int, list[str]] = {}
    for reason, measure in by.items():
        values = [measure(item) for item in items]
        for place in nlargest(EACH, range(len(items)), key=values.__getitem__):
            # With a value of 0, an item is one of many: most devices are never down.
            if values[place] > 0:
                reasons.setdefault(place, []).append(reason)
    selected = []
    for place, own_reasons in reasons.items():
        selected.append((items[place], ", ".join(own_reasons)))
    return selected


def devices_shown(devices: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Select devices from ``metrics()["devices"]``, each with the reason."""

    def busy_share(name: str) -> float:
        row = devices[name]
        return float(row["compute_share"] + row["communicate_share"])

    measures: dict[str, Callable[[str], float]] = {
        "longest down": lambda name: devices[name]["down"],
        "busiest": busy_share,
        "computes longest": lambda name: devices[name]["compute"],
        "sends most": lambda name: devices[name]["bytes_sent"],
        "receives most": lambda name: devices[name]["bytes_received"],
        "most idle": lambda name: devices[name]["idle"],
        "slowed most by the host": lambda name: devices[name]["deficit_share"],
    }
    return dict(standing_out(list(devices), measures))


def links_shown(
    links: Sequence[Mapping[str, Any]],
) -> list[tuple[Mapping[str, Any], str]]:
    """Select links from ``metrics()["links"]``, each with the reason."""
    measures: dict[str, Callable[[Mapping[str, Any]], float]] = {
        "out of tolerance": lambda link: link["problem"] is not None,
        "lost most casts": lambda link: link["casts"] - link["casts_heard"],
        "carried most": lambda link: link["bytes"],
        "used most": lambda link: link["used_share"] or 0.0,
    }
    return standing_out(links, measures)


def shortened(section: Section) -> Section:
    """Return a table with at most `MOST` rows: the first ones, or the last if the terminal shows the last ones."""
    excess = len(section.rows) - MOST
    if excess <= 0:
        return section
    rows = (
        section.rows[excess:] if section.max_printed_rows < 0 else section.rows[:MOST]
    )
    return replace(section, rows=rows, omitted_rows=excess)


def abridged(value: Any, file: str) -> Any:
    """Truncate long lists and mappings in plain values, with a reference to the file with all entries.

    >>> abridged({"seed": 1, "devices": list(range(1000))}, "plan.json")["devices"][-1]
    '... 990 more are in plan.json'
    """
    if not isinstance(value, Mapping | list):
        return value
    is_long = len(value) > MOST
    count = EACH if is_long else len(value)
    more = f"{len(value) - EACH:,} more are in {file}"
    if isinstance(value, Mapping):
        entries = {}
        for key, each in islice(value.items(), count):
            entries[key] = abridged(each, file)
        if is_long:
            entries["..."] = more
        return entries
    items = [abridged(each, file) for each in islice(value, count)]
    if is_long:
        items.append(f"... {more}")
    return items
