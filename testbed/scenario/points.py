"""Points of a sweep: their values, labels and names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LABEL = "label"
"""Key of the display name of a swept value, as in ``{label: FedAvg, value: {...}}``, or of an entry of ``points``."""


def value_label(value: object) -> str | None:
    """Return the label of a swept value, None without one."""
    if isinstance(value, Mapping) and set(value) == {LABEL, "value"}:
        return str(value[LABEL])
    return None


def plain_value(value: Any) -> Any:
    """Return a swept value without its label."""
    return value if value_label(value) is None else value["value"]


def point_parts(point: Mapping[str, object]) -> list[str]:
    """Return the parts of a point's name: ``key=value`` for each swept key, or the label alone.

    Example: ``{"network.link.rate": "5mbit", "workload.method": {"label": "FedAvg", ...}}`` gives
    ``["rate=5mbit", "method=FedAvg"]``.
    """
    if LABEL in point:
        return [str(point[LABEL])]
    short = [key.rpartition(".")[2] for key in point]
    keys = short if len(set(short)) == len(short) else list(point)
    return [
        f"{key}={value_text(value)}"
        for key, value in zip(keys, point.values(), strict=True)
    ]


def value_text(value: object) -> str:
    """Format a swept value: its label, or names and values of a mapping such as a method with options."""
    if (label := value_label(value)) is not None:
        return label
    if not isinstance(value, Mapping):
        return str(value)
    return " ".join(
        value_text(inner) if key == "name" else f"{key} {value_text(inner)}"
        for key, inner in value.items()
    )


def point_text(point: Mapping[str, object]) -> str:
    """Format a sweep point for display; labelled values have no key."""
    if LABEL in point:
        return str(point[LABEL])
    names = short_keys(list(point))
    parts = []
    for key, value in point.items():
        text = value_text(value)
        parts.append(text if value_label(value) is not None else f"{names[key]} {text}")
    return ", ".join(parts)


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Shorten dotted keys to as many trailing parts as distinguish them from each other.

    The name of a part is called as the part is: ``workload.method.name`` is the method.
    """
    parts = {key: key.removesuffix(".name").split(".") for key in keys}
    shortened = {}
    for key, own in parts.items():
        taken = 1
        while any(
            other[-taken:] == own[-taken:]
            for each, other in parts.items()
            if each != key
        ) and taken < len(own):
            taken += 1
        shortened[key] = " ".join(own[-taken:]).replace("_", " ")
    return shortened
