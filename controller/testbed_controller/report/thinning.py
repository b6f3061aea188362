"""Selection of notable devices, links and rows for pages of large runs.

A page with more than `MAX_SHOWN` devices shows those with the highest value of any measure, such as the time down, with
the measure as the reason, and names the file that has all devices. The same holds for links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from heapq import nlargest
from itertools import islice
from typing import Any, TypeVar

from testbed_controller.report.tables import Section

MAX_SHOWN = 400
"""Maximum number of devices, links, rows or list entries on a page without selection."""
SELECTED_PER_MEASURE = 10
"""Number of devices or links selected by each measure."""
ENTRIES_KEPT = 10
"""Number of entries to which a list of more than `MAX_SHOWN` entries is truncated."""
Item = TypeVar("Item")


def select_notable(
    items: Sequence[Item], measures: Mapping[str, Callable[[Item], float]]
) -> list[tuple[Item, str]]:
    """Return the selected items, each with the reason for the selection: the names of measures.

    Up to `MAX_SHOWN` items are all returned, with empty reasons. Of more items, those with the largest positive value
    of each measure are selected; of equal items, the first ones.
    """
    if len(items) <= MAX_SHOWN:
        return [(item, "") for item in items]
    reasons: dict[int, list[str]] = {}
    indices = range(len(items))
    for name, measure in measures.items():
        values = [measure(item) for item in items]
        for index in nlargest(SELECTED_PER_MEASURE, indices, key=values.__getitem__):
            # An item with a value of 0 is not notable: most devices are never down.
            if values[index] > 0:
                reasons.setdefault(index, []).append(name)
    return [(items[index], ", ".join(names)) for index, names in reasons.items()]


def notable_devices(devices: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the names of notable devices with the reasons; ``devices`` come from the metrics."""

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
    return dict(select_notable(list(devices), measures))


def notable_links(
    links: Sequence[Mapping[str, Any]],
) -> list[tuple[Mapping[str, Any], str]]:
    """Return notable links with the reasons; ``links`` come from the metrics."""
    measures: dict[str, Callable[[Mapping[str, Any]], float]] = {
        "out of tolerance": lambda link: link["problem"] is not None,
        "lost most casts": lambda link: link["casts"] - link["casts_heard"],
        "carried most": lambda link: link["bytes"],
        "used most": lambda link: link["used_share"] or 0.0,
    }
    return select_notable(links, measures)


def limit_rows(section: Section) -> Section:
    """Return a table with at most `MAX_SHOWN` rows: the first ones, or the last if the terminal shows the last ones."""
    excess = len(section.rows) - MAX_SHOWN
    if excess <= 0:
        return section
    rows = section.rows[:MAX_SHOWN]
    if section.max_printed_rows < 0:
        rows = section.rows[excess:]
    return replace(section, rows=rows, omitted_rows=excess)


def abridge(value: Any, file: str) -> Any:
    """Return plain values with truncated lists and mappings, which name the file with all entries.

    >>> abridge({"seed": 1, "devices": list(range(1000))}, "plan.json")["devices"][-1]
    '... 990 more are in plan.json'
    """
    if not isinstance(value, Mapping | list):
        return value
    is_long = len(value) > MAX_SHOWN
    count = ENTRIES_KEPT if is_long else len(value)
    more = f"{len(value) - ENTRIES_KEPT:,} more are in {file}"
    if isinstance(value, Mapping):
        entries = {}
        for key, each in islice(value.items(), count):
            entries[key] = abridge(each, file)
        if is_long:
            entries["..."] = more
        return entries
    items = [abridge(each, file) for each in islice(value, count)]
    if is_long:
        items.append(f"... {more}")
    return items
