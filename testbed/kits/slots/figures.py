"""What is said of runs in timeslots beside what is said of all runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from testbed.kits.slots.planner import SlotDetails, timetable_of
from testbed.trace.events import Event, EventType
from testbed.trace.figures import Declared, Figure
from testbed.trace.intervals import Interval
from testbed.trace.record import Record

GOOD = 0.8
"""The accuracy to which the paper counts the time."""


def _deviation(record: Record) -> float | None:
    found = [event.fields.get("deviation") for event in record.of("evaluate")]
    return found[-1] if found else None


def _accuracy(by: str) -> Callable[[Record], float | None]:
    """Return the figure of the last evaluation: ``gathered``, by what ``one`` device heard, or by ``any``."""

    def of(record: Record) -> float | None:
        found = record.of("evaluate")
        fields: Mapping[str, Any] = found[-1].fields if found else {}
        accuracy: float | None = fields.get("accuracy")
        if by == "gathered":
            return accuracy if "one" in fields else None
        value: float | None = fields.get(by, accuracy if by == "one" else None)
        return value

    return of


def _passed(record: Record, passing: str) -> float | None:
    """Take each device's last count: it goes on counting, tests included, until it restarts."""
    last = {event.device: event.fields for event in record.of("passed") if event.fields["to"] == passing}
    due = sum(fields["due"] for fields in last.values())
    return sum(fields["came"] for fields in last.values()) / due if due else None


def _tests(record: Record) -> list[Interval]:
    """Batches of tests begin at the event and end with an evaluation, at which nothing of training was under way."""
    begins = [event.time for event in record.of("tests")]
    ends = [event.time for event in record.of("evaluate")]
    return list(zip(begins, [*ends, *[float("inf")] * (len(begins) - len(ends))], strict=False))


def _training_casts(record: Record) -> list[Event]:
    spans = _tests(record)
    return [each for each in record.of("cast") if not any(begin <= each.time < end for begin, end in spans)]


def details_of(record: Record) -> SlotDetails:
    """Return the details of a run's plan; of a run that is read again they are plain values with the same names."""
    details: Any = record.plan.details
    return details  # type: ignore[no-any-return]


def _last_backward(record: Record) -> float:
    """Return when the last one began; 0 where none did."""
    begun = (event.time for event in record.of("begin") if event.fields["span"] == "backward")
    return max(begun, default=0.0)


def _timeslots(record: Record) -> float | None:
    """Counted by the clock, in seconds of which rounding must not make the slot before."""
    last, details = _last_backward(record), details_of(record)
    return (last - (details.begin or 0.0) + 1e-6) // details.slot + 1 if last else None


def _time_to_good(record: Record) -> float | None:
    """Seconds of the steps until then, without the tests between them: as if the pipeline had never drained."""
    details = details_of(record)
    reached = (event.fields["step"] for event in record.of("evaluate") if event.fields["accuracy"] >= GOOD)
    step = next(reached, None)
    return None if step is None else timetable_of(details).slots(step * details.micro_batches) * details.slot


def _rate(record: Record) -> float | None:
    """As the paper counts packets: to each receiver one."""
    last = _last_backward(record)
    seconds = last - (details_of(record).begin or 0.0) - sum(end - begin for begin, end in _tests(record) if end < last)
    meant = sum(len(each.fields["peers"]) for each in _training_casts(record))
    return meant / seconds / len(record.plan.devices) if seconds > 0 else None


DECLARED = Declared(
    figures=(
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
            "training_casts",
            "number",
            "transmissions, acknowledgements too, without those of tests",
            lambda record: len(_training_casts(record)),
        ),
        Figure(
            "transmissions_rate", "number", "a second and device while training, one for each receiver of a cast", _rate
        ),
        Figure("timeslots", "number", "until the last backward, those of tests between steps among them", _timeslots),
        Figure(
            "time_to_80",
            "seconds",
            "timeslots of training, without those of tests, until an evaluation first found an accuracy of 80 %",
            _time_to_good,
        ),
        Figure(
            "accuracy_one", "share", "of the tests, by the results that the device that leads heard", _accuracy("one")
        ),
        Figure(
            "accuracy_any",
            "share",
            "of the tests, those right by the results that at least one device of the output layer heard",
            _accuracy("any"),
        ),
        Figure("accuracy_gathered", "share", "of the tests, by results of which none is lost", _accuracy("gathered")),
        Figure("accuracy_deviation", "share", "standard deviation of the accuracy over the test runs", _deviation),
    ),
    events=(
        EventType("tests", "training stands still, and test runs begin", ("batch",), ("step",)),
        EventType("passed", "parts that a device needed of others so far, and that came", (), ("to", "due", "came")),
    ),
)
