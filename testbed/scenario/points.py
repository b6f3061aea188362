"""The values, labels and names of a sweep's points. A point is a mapping of dotted keys to swept values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LABEL = "label"
"""Key of the display name of a swept value, as in ``{label: FedAvg, value: {...}}``, or of an entry of ``points``."""


def value_label(value: object) -> str | None:
    """Return the label of a swept value, None without one.

    >>> value_label({"label": "FedAvg", "value": {"name": "federated"}})
    'FedAvg'
    """
    if isinstance(value, Mapping) and set(value) == {LABEL, "value"}:
        return str(value[LABEL])
    return None


def plain_value(value: Any) -> Any:
    """Return a swept value without label.

    >>> plain_value({"label": "FedAvg", "value": {"name": "federated"}})
    {'name': 'federated'}
    """
    return value if value_label(value) is None else value["value"]


def point_parts(point: Mapping[str, object]) -> list[str]:
    """Return the parts of a point's name: ``key=value`` for each swept key, or the label alone.

    >>> point_parts({"network.link.rate": "5mbit", "workload.batch_size": 64})
    ['rate=5mbit', 'batch_size=64']
    """
    if LABEL in point:
        return [str(point[LABEL])]
    keys = [key.rpartition(".")[2] for key in point]
    if len(set(keys)) < len(keys):
        keys = list(point)
    values = map(value_text, point.values())
    return [f"{key}={text}" for key, text in zip(keys, values, strict=True)]


def value_text(value: object) -> str:
    """Format a swept value: its label, or names and values of a mapping such as a method with options.

    >>> value_text({"name": "pipeline", "micro_batches": 4})
    'pipeline micro_batches 4'
    """
    label = value_label(value)
    if label is not None:
        return label
    if not isinstance(value, Mapping):
        return str(value)
    texts = []
    for key, inner in value.items():
        text = value_text(inner)
        texts.append(text if key == "name" else f"{key} {text}")
    return " ".join(texts)


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
    """Shorten dotted keys to the fewest trailing parts for which all keys differ.

    The ``name`` of a section stands for the section: ``workload.method.name`` is the method.

    >>> short_keys(["workload.method.name", "network.link.rate"])
    {'workload.method.name': 'method', 'network.link.rate': 'rate'}
    """
    split_keys = {key: key.removesuffix(".name").split(".") for key in keys}
    shortened = {}
    for key, parts in split_keys.items():
        others = [other for other_key, other in split_keys.items() if other_key != key]
        length = 1
        # One part more as long as another key ends in the same parts.
        while length < len(parts):
            if parts[-length:] not in [other[-length:] for other in others]:
                break
            length += 1
        shortened[key] = " ".join(parts[-length:]).replace("_", " ")
    return shortened
