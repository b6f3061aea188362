"""What asynchronous training and recovering from faults tell beside their figures, row by row as it is shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from testbed import formats


@dataclass(frozen=True)
class Phases:
    """How a recovery went; seconds, None where the method does not tell them or it did not come to that."""

    missing: str
    case: str
    """Which of its cases the method took it for."""
    step: int | None
    """Trained first afterwards."""
    detection: float | None
    """From the strike."""
    repartition: float | None
    """From the detection to the decision who goes on with what."""
    redistribution: float | None
    """From that decision until all devices have what they need for it."""
    first_batch: float | None
    """From the detection until the first batch after it is trained."""
    moved: float | None
    """Bytes of weights and optimizer state."""


@dataclass(frozen=True)
class Change:
    """A change of the partition in a run that goes on."""

    time: float
    step: int | None
    partition: str
    pause: float
    """Seconds from when no further batch was let in until training could go on."""
    draining: float
    """Of them, until the pipeline was empty."""
    moved: float
    """Bytes of weights and optimizer state."""


@dataclass(frozen=True)
class Kept:
    """What a stage held in one stretch of asynchronous training, between two changes of the partition."""

    until: int
    """Last batch of the stretch."""
    stage: int
    device: str
    in_use: int
    """Most versions that batches under way still needed at once."""
    kept: int
    """Most versions at once, with the latest and those kept for aggregation."""
    allowed: int
    """Batches that may be under way from this stage on."""
    size: float
    """Bytes of the versions kept."""
    replicas: float
    """Bytes that it keeps of other stages."""


def phases(metrics: Mapping[str, Any]) -> Iterator[Phases]:
    """Yield the recoveries whose method tells of their phases."""
    for item in metrics["recovery_list"]:
        if item.get("repartitioned") is None and item.get("trained") is None:
            continue
        yield Phases(
            ", ".join(item["missing"]) or formats.NONE,
            item.get("case") or formats.NONE,
            item["step"],
            _between(item, "struck", "detected"),
            _between(item, "detected", "repartitioned"),
            _between(item, "repartitioned", "redistributed"),
            _between(item, "detected", "trained"),
            item.get("moved"),
        )


def _between(item: Mapping[str, Any], begun: str, ended: str) -> float | None:
    first, last = item.get(begun), item.get(ended)
    return None if first is None or last is None else last - first


def changes(metrics: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the repartitions without a failure, in the order of time."""
    for item in metrics.get("repartition_list", ()):
        parts = ", ".join(f"{device} {units(first, last)}" for device, first, last in item["partition"])
        yield Change(item["time"], item.get("step"), parts, item["seconds"], item["draining"], item["bytes"])


def units(first: int, last: int) -> str:
    """Write the units from ``first`` to before ``last``."""
    return f"{first}–{last - 1}" if last - first > 1 else f"{first}" if last > first else "none"


def kept(metrics: Mapping[str, Any]) -> list[Kept]:
    """Return what the stages kept, stretch by stretch and stage by stage."""
    rows: Sequence[Mapping[str, Any]] = metrics.get("version_list", ())
    found = [
        Kept(
            row["step"],
            row["stage"],
            row["device"],
            row["in_use"],
            row["kept"],
            row["allowed"],
            row["bytes"],
            row["replicas"],
        )
        for row in rows
    ]
    return sorted(found, key=lambda row: (row.until, row.stage))
