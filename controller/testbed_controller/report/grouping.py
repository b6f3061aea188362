"""Groups of links with the same requested properties, to show many links in few lines."""

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
    """Directed links with equal requested properties, as texts for display."""

    name: str
    """Names of the links, abbreviated."""
    requested: str
    measured: str
    """Range of the measured values."""
    traffic: str
    """Bytes carried by all links together."""
    used: str
    """Traffic of the busiest link, as a share of the capacity of its rate."""
    problem: str | None = None
    """Reason why a measured link is outside its tolerance."""


def describe(link: Mapping[str, Any] | None) -> str:
    """Format all requested properties of a link; ``link`` has the keys of `Link.to_json`.

    >>> from testbed.network.link import Link
    >>> describe(Link(rate=50e6, delay=0.005, loss=0.01).to_json())
    '50 mbit, 5 ms, 1% loss'
    """
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
    text += f" ± {formats.seconds(link['jitter'])}"
    if link["distribution"] != "normal":
        text += f" {link['distribution']}"
    return text + _format_correlation(link.get("jitter_correlation"))


def _describe_losses(link: Mapping[str, Any]) -> Iterator[str]:
    if link.get("loss"):
        correlation = _format_correlation(link.get("loss_correlation"))
        yield f"{_format_fraction(link['loss'])} loss{correlation}"
    bursts = link.get("bursts")
    if bursts is not None:
        start = _format_fraction(bursts["p"])
        end = _format_fraction(bursts["r"])
        yield f"bursts of loss p {start} r {end}"
    if link.get("message_loss"):
        lost = "casts"
        if link.get("frame") is not None:
            lost = f"casts' frames of {link['frame']} bytes"
        yield f"{_format_fraction(link['message_loss'])} of {lost} lost"


def _format_correlation(value: float | None) -> str:
    return f" correlated {_format_fraction(value)}" if value else ""


def _format_fraction(value: float) -> str:
    """Format a requested fraction exactly, unlike a measured one."""
    return f"{value * 100:.6g}%"


def group_links(rows: Sequence[Mapping[str, Any]]) -> list[LinkGroup]:
    """Return the groups of links with equal requested properties; ``rows`` are ``links`` of the metrics.

    A link with a problem is a group of its own. These groups come first.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        # The name keeps a link with a problem apart; all other links share the empty name.
        name_of_problem = ""
        if row["problem"]:
            name_of_problem = f"{row['source']} {row['destination']}"
        key = (name_of_problem, _describe_request(row))
        groups.setdefault(key, []).append(row)
    link_groups = [_make_group(members) for members in groups.values()]
    return sorted(link_groups, key=lambda group: group.problem is None)


def combine_links(rows: Sequence[Mapping[str, Any]]) -> LinkGroup:
    """Return all links as one group, for a row with their total traffic."""
    return replace(
        _make_group(rows),
        name=f"all {len(rows):,}",
        requested=formats.NONE,
        problem=None,
    )


def _describe_request(row: Mapping[str, Any]) -> str:
    """Format the requested properties of a link, with the rate limit of the devices' access or cell."""
    link = row["requested"]
    # Without the limit, a link behind a slow access would be shown as "unlimited".
    limit = row.get("rate_at_best")
    if link is not None and link["rate"] is None and limit is not None:
        link = {**link, "rate": limit}
    return describe(link)


def _make_group(rows: Sequence[Mapping[str, Any]]) -> LinkGroup:
    used_shares = []
    measurements = []
    traffic = 0
    for row in rows:
        traffic += row["bytes"]
        # A link without a rate has no capacity to be used.
        if row["used_share"] is not None:
            used_shares.append(row["used_share"])
        if row["measured"]:
            measurements.append(row["measured"])
    return LinkGroup(
        name=name_of(rows),
        requested=_describe_request(rows[0]),
        measured=format_measurements(measurements),
        traffic=formats.size(traffic),
        used=formats.whole_share(max(used_shares)) if used_shares else formats.NONE,
        problem=rows[0]["problem"],
    )


def name_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a short name for directed links, given by their ``source`` and ``destination``."""
    pairs = [(row["source"], row["destination"]) for row in rows]
    arrows = _format_arrows(pairs)
    if len(arrows) <= MOST_NAMED:
        return ", ".join(arrows)
    names = list(dict.fromkeys(chain.from_iterable(pairs)))
    # A full mesh: every device has a link to every other one.
    if len(pairs) == len(names) * (len(names) - 1):
        return f"all {len(pairs)} among {_abbreviate_names(names)}"
    # A star: one of the first link's devices is an end of all links.
    for hub in pairs[0]:
        if all(hub in pair for pair in pairs):
            others = [name for name in names if name != hub]
            # A dash if the group lacks a direction of any link.
            arrow = "↔" if len(pairs) == 2 * len(others) else "–"
            return f"{hub} {arrow} {_abbreviate_names(others)}"
    first = ", ".join(arrows[: MOST_NAMED - 1])
    return f"{first} and {len(arrows) - MOST_NAMED + 1} more"


def _format_arrows(pairs: Sequence[Pair]) -> list[str]:
    """Return a text for each pair of devices, with one arrow for both directions: ``a ↔ b``."""
    arrows: dict[frozenset[str], str] = {}
    for source, destination in pairs:
        ends = frozenset((source, destination))
        if ends in arrows:
            arrows[ends] = arrows[ends].replace("→", "↔")
        else:
            arrows[ends] = f"{source} → {destination}"
    return list(arrows.values())


def _abbreviate_names(names: Sequence[str]) -> str:
    """List the names of a few devices; of many, the first two and the last."""
    if len(names) <= 2 * MOST_NAMED:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, …, {names[-1]}"


def format_measurements(measurements: Sequence[Mapping[str, Any]]) -> str:
    """Format the range of the measurements of equal links."""
    if not measurements:
        return "not measured"
    parts = []
    for key, write in (("rate", formats.rate), ("delay", formats.seconds)):
        values = _known_values(measurements, key)
        if values:
            parts.append(_format_range(write(min(values)), write(max(values))))
    losses = _known_values(measurements, "loss")
    if losses and max(losses) > 0:
        least = formats.share(min(losses))
        most = formats.share(max(losses))
        parts.append(f"{_format_range(least, most)} loss")
    return ", ".join(parts)


def _known_values(measurements: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [item[key] for item in measurements if item[key] is not None]


def _format_range(low: str, high: str) -> str:
    """Format a range, with the unit once if both ends have the same: ``4.9–5 ms``."""
    if low == high:
        return low
    low_number, _, low_unit = low.partition(" ")
    _, _, high_unit = high.partition(" ")
    if low_unit == high_unit:
        return f"{low_number}–{high}"
    return f"{low}–{high}"
