"""What EdgePipe tells of its runs beside what all methods do."""

from __future__ import annotations

from testbed.trace.figures import Declared, Figure
from testbed.trace.record import Record


def _learned(record: Record) -> float | None:
    """Each piece updates its units once a batch, unless losses of the layer behind are missing."""
    due = len(record.of("step")) * sum(piece.last - piece.first for piece in record.plan.pieces)
    made = sum(event.fields["span"] == "backward" for event in record.of("compute"))
    return made / due if due else None


def _deviation(record: Record) -> float | None:
    found = [event.fields.get("deviation") for event in record.of("evaluate")]
    return found[-1] if found else None


DECLARED = Declared(
    figures=(
        Figure(
            "learned",
            "share",
            "of all updates of layers, those made: all losses of the layer behind had arrived",
            _learned,
            brief=True,
        ),
        Figure("accuracy_deviation", "share", "standard deviation of the accuracy over the test runs", _deviation),
    )
)
