"""Many links told in few lines: those with the same figures asked of them stand together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.report import formats


@dataclass(frozen=True)
class LinkGroup:
    """Directed links that the scenario asks the same of. Texts are ready to be shown."""

    name: str
    count: int
    requested: str
    measured: str
    traffic: str
    used: str
    problem: str | None = None


def describe(link: Mapping[str, Any] | None) -> str:
    """Write rate, one-way delay and loss of a link."""
    if link is None:
        return formats.NONE
    if not link.get("up", True):
        return "cut"
    parts = [formats.rate(link["rate"]), formats.seconds(link["delay"])]
    return ", ".join(parts + ([f"{formats.share(link['loss'])} loss"] if link["loss"] else []))


def group_links(rows: Sequence[Mapping[str, Any]]) -> list[LinkGroup]:
    """Group the rows of ``metrics()["links"]``; a link with a problem stands alone, and first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        alone = f"{row['source']} {row['destination']}" if row["problem"] else ""
        groups.setdefault(f"{alone}|{describe(row['requested'])}", []).append(row)
    found = [_group(members) for members in groups.values()]
    return sorted(found, key=lambda group: group.problem is None)


def _group(rows: Sequence[Mapping[str, Any]]) -> LinkGroup:
    used = [row["used_share"] for row in rows if row["used_share"] is not None]
    return LinkGroup(
        name=_name(rows),
        count=len(rows),
        requested=describe(rows[0]["requested"]),
        measured=measured([row["measured"] for row in rows if row["measured"]]),
        traffic=formats.size(sum(row["bytes"] for row in rows)),
        used=formats.whole_share(max(used)) if used else formats.NONE,
        problem=rows[0]["problem"],
    )


def _name(rows: Sequence[Mapping[str, Any]]) -> str:
    pairs = [(row["source"], row["destination"]) for row in rows]
    if len(pairs) == 1:
        return f"{pairs[0][0]} → {pairs[0][1]}"
    if len(pairs) == 2 and pairs[0] == pairs[1][::-1]:
        return f"{pairs[0][0]} ↔ {pairs[0][1]}"
    names = dict.fromkeys(name for pair in pairs for name in pair)
    return f"{len(pairs)} links of {len(names)} devices"


def measured(found: Sequence[Mapping[str, Any]]) -> str:
    """Write the range that measurements of alike links span."""
    if not found:
        return "not measured"
    parts = []
    for key, write in (("rate", formats.rate), ("delay", formats.seconds)):
        values = [item[key] for item in found if item[key] is not None]
        if values:
            parts.append(_range(write(min(values)), write(max(values))))
    lost = [item["loss"] for item in found if item["loss"] is not None]
    if lost and max(lost) > 0:
        parts.append(f"{_range(formats.share(min(lost)), formats.share(max(lost)))} loss")
    return ", ".join(parts)


def _range(low: str, high: str) -> str:
    if low == high:
        return low
    low_number, _, low_unit = low.partition(" ")
    return f"{low_number}–{high}" if low_unit == high.partition(" ")[2] else f"{low}–{high}"
