"""What EdgePipe tells of its runs beside what all methods do."""

from __future__ import annotations

from testbed.trace.events import EventType
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


def _passed(record: Record, passing: str) -> float | None:
    """Take each device's last count: it goes on counting, tests included, until it restarts."""
    last = {event.device: event.fields for event in record.of("passed") if event.fields["to"] == passing}
    due = sum(fields["due"] for fields in last.values())
    return sum(fields["came"] for fields in last.values()) / due if due else None


def _training_casts(record: Record) -> int:
    """Batches of tests begin at the event and end with an evaluation, at which nothing of training was under way."""
    begins = [event.time for event in record.of("tests")]
    ends = [event.time for event in record.of("evaluate")]
    spans = list(zip(begins, [*ends, *[float("inf")] * (len(begins) - len(ends))], strict=False))
    return sum(not any(begin <= event.time < end for begin, end in spans) for event in record.of("cast"))


DECLARED = Declared(
    figures=(
        Figure(
            "learned",
            "share",
            "of all updates of layers, those made: all losses of the layer behind had arrived",
            _learned,
            brief=True,
        ),
        Figure(
            "forward_passed",
            "share",
            "of the outputs that a layer needed of other devices, those that came in time",
            lambda record: _passed(record, "forward"),
        ),
        Figure(
            "backward_passed",
            "share",
            "of the losses that a layer needed of other devices, those that came in time",
            lambda record: _passed(record, "backward"),
        ),
        Figure(
            "sharing_passed",
            "share",
            "of the results that the output layer shares, those that came in time",
            lambda record: _passed(record, "sharing"),
        ),
        Figure(
            "training_casts", "number", "transmissions, acknowledgements too, without those of tests", _training_casts
        ),
        Figure("accuracy_deviation", "share", "standard deviation of the accuracy over the test runs", _deviation),
    ),
    events=(
        EventType("tests", "training stands still, and test runs begin", ("batch",), ("step",)),
        EventType("passed", "parts that a device needed of others so far, and that came", None, ("to", "due", "came")),
    ),
)
