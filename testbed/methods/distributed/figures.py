"""Figures of distributed inference beside those of every run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed.common.formats import size
from testbed.methods.distributed.messages import TileInput, TileOutput, TileOverlap
from testbed.trace.events import EventType
from testbed.trace.figures import Declared, Figure, Metrics, Row
from testbed.trace.record import Record

TILE_KINDS = (TileInput.kind, TileOverlap.kind, TileOutput.kind)


def _fullest(metrics: Metrics) -> tuple[str, Mapping[str, Any]]:
    """Return the device that held most, of those that said what they hold."""
    held = {name: row for name, row in metrics["devices"].items() if "weights" in row}
    return max(held.items(), key=lambda item: float(item[1]["weights"] + item[1]["activations"]))


def _memory(metrics: Metrics) -> str:
    _, row = _fullest(metrics)
    return size(row["weights"] + row["activations"])


def _parts(metrics: Metrics) -> str:
    name, row = _fullest(metrics)
    return f"at most, on {name}: {size(row['weights'])} weights, {size(row['activations'])} activations"


def _known(metrics: Metrics) -> bool:
    return "requests" in metrics and any("weights" in row for row in metrics["devices"].values())


def _tile_bytes(record: Record) -> int | None:
    about = [event.fields["bytes"] for event in record.of("send") if event.fields["message"] in TILE_KINDS]
    return sum(about) if about else None


def _stolen(record: Record) -> int | None:
    given = [event.fields for event in record.of("tile")]
    return sum(fields["owner"] != fields["by"] for fields in given) if given else None


DECLARED = Declared(
    events=(
        EventType("tile", "the source has a device compute a tile", ("batch",), ("request", "tile", "owner", "by")),
    ),
    figures=(
        Figure("tiles_stolen", "number", "computed by other devices than the plan says, since they were idle", _stolen),
        Figure(
            "tile_bytes", "bytes", "sent about tiles: of the image, what tiles reuse, what they become", _tile_bytes
        ),
    ),
    rows=(Row("Memory", _memory, _parts, when=_known),),
)
