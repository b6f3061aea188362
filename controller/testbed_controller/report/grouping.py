"""Many links in few lines: links with the same requested figures are one group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from testbed.common import formats
from testbed.network.link import Pair

MOST_NAMED = 3
"""Maximum number of links of a group named individually."""


@dataclass(frozen=True)
class LinkGroup:
    """Directed links with equal requested properties. All texts are ready for display."""

    name: str
    requested: str
    measured: str
    traffic: str
    used: str
    problem: str | None = None


def describe(link: Mapping[str, Any] | None) -> str:
    """Format all requested properties of a link, given as a mapping with the fields of `Link`."""
    if link is None:
        return formats.NONE
    if not link.get("up", True):
        return "cut"
    parts = [formats.rate(link["rate"]), _format_delay(link), *_describe_losses(link)]
    for key, text in (
        ("duplicate", "duplicated"),
        ("reorder", "reordered"),
        ("corrupt", "corrupted"),
    ):
        if link.get(key):
            parts.append(f"{_format_fraction(link[key])} {text}")
    if link.get("limit") is not None:
        parts.append(f"queue of {link['limit']}")
    return ", ".join(parts)


def _format_delay(link: Mapping[str, Any]) -> str:
    text = formats.seconds(link["delay"])
    if not link.get("jitter"):
        return text
    kind = "" if link["distribution"] == "normal" else f" {link['distribution']}"
    correlated = (
        f" correlated {_format_fraction(link['jitter_correlation'])}"
        if link.get("jitter_correlation")
        else ""
    )
    return f"{text} ± {formats.seconds(link['jitter'])}{kind}{correlated}"


def _describe_losses(link: Mapping[str, Any]) -> Iterator[str]:
    if link.get("loss"):
        correlated = (
            f" correlated {_format_fraction(link['loss_correlation'])}"
            if link.get("loss_correlation")
            else ""
        )
        yield f"{_format_fraction(link['loss'])} loss{correlated}"
    if (bursts := link.get("bursts")) is not None:
        yield f"bursts of loss p {_format_fraction(bursts['p'])} r {_format_fraction(bursts['r'])}"
    if link.get("message_loss"):
        what = (
            "casts"
            if link.get("frame") is None
            else f"casts' frames of {link['frame']} bytes"
        )
        yield f"{_format_fraction(link['message_loss'])} of {what} lost"


def _format_fraction(value: float) -> str:
    """Format a requested fraction exactly, unlike a measured one."""
    return f"{value * 100:.6g}%"


def group_links(rows: Sequence[Mapping[str, Any]]) -> list[LinkGroup]:
    """Group the rows of ``metrics()["links"]``; a link with a problem stands alone, and first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        alone = f"{row['source']} {row['destination']}" if row["problem"] else ""
        groups.setdefault(f"{alone}|{_describe_request(row)}", []).append(row)
    link_groups = [_make_group(members) for members in groups.values()]
    return sorted(link_groups, key=lambda group: group.problem is None)


def together(rows: Sequence[Mapping[str, Any]]) -> LinkGroup:
    """Return the total traffic of several links."""
    return replace(
        _make_group(rows),
        name=f"all {len(rows):,}",
        requested=formats.NONE,
        problem=None,
    )


def _describe_request(row: Mapping[str, Any]) -> str:
    """Format the requested properties of a link, with the rate limit of its devices' access or cell."""
    link = row["requested"]
    own = link is None or link["rate"] is not None or row.get("rate_at_best") is None
    return describe(link if own else {**link, "rate": row["rate_at_best"]})


def _make_group(rows: Sequence[Mapping[str, Any]]) -> LinkGroup:
    used = [row["used_share"] for row in rows if row["used_share"] is not None]
    return LinkGroup(
        name=name_of(rows),
        requested=_describe_request(rows[0]),
        measured=measured([row["measured"] for row in rows if row["measured"]]),
        traffic=formats.size(sum(row["bytes"] for row in rows)),
        used=formats.whole_share(max(used)) if used else formats.NONE,
        problem=rows[0]["problem"],
    )


def name_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Name directed links, given by their ``source`` and ``destination``, in few words."""
    pairs = [(row["source"], row["destination"]) for row in rows]
    named = _format_arrows(pairs)
    if len(named) <= MOST_NAMED:
        return ", ".join(named)
    names = dict.fromkeys(chain.from_iterable(pairs))
    if len(pairs) == len(names) * (len(names) - 1):
        return f"all {len(pairs)} among {_abbreviate_names(list(names))}"
    hub = next((name for name in pairs[0] if all(name in pair for pair in pairs)), None)
    if hub is not None:
        others = [name for name in names if name != hub]
        arrow = "↔" if len(pairs) == 2 * len(others) else "–"
        return f"{hub} {arrow} {_abbreviate_names(others)}"
    return (
        f"{', '.join(named[: MOST_NAMED - 1])} and {len(named) - MOST_NAMED + 1} more"
    )


def _format_arrows(pairs: Sequence[Pair]) -> list[str]:
    """Return the links one by one, both directions of a pair as one."""
    named: dict[frozenset[str], str] = {}
    for a, b in pairs:
        ends = frozenset((a, b))
        named[ends] = named[ends].replace("→", "↔") if ends in named else f"{a} → {b}"
    return list(named.values())


def _abbreviate_names(names: Sequence[str]) -> str:
    """Name all of a few devices, the first and the last of many."""
    return (
        ", ".join(names)
        if len(names) <= 2 * MOST_NAMED
        else f"{names[0]}, {names[1]}, …, {names[-1]}"
    )


def measured(measurements: Sequence[Mapping[str, Any]]) -> str:
    """Format the range of the measurements of equal links."""
    if not measurements:
        return "not measured"
    parts = []
    for key, write in (("rate", formats.rate), ("delay", formats.seconds)):
        values = [item[key] for item in measurements if item[key] is not None]
        if values:
            parts.append(_format_range(write(min(values)), write(max(values))))
    lost = [item["loss"] for item in measurements if item["loss"] is not None]
    if lost and max(lost) > 0:
        parts.append(
            f"{_format_range(formats.share(min(lost)), formats.share(max(lost)))} loss"
        )
    return ", ".join(parts)


def _format_range(low: str, high: str) -> str:
    if low == high:
        return low
    low_number, _, low_unit = low.partition(" ")
    return (
        f"{low_number}–{high}"
        if low_unit == high.partition(" ")[2]
        else f"{low}–{high}"
    )
