"""What the host's processors did for a run."""

from testbed.trace import host
from testbed.trace.events import Event
from tests.helpers import recorded


def took(*rows: tuple[str, float, float]) -> list[Event]:
    return [
        Event(
            1.0 + number,
            device,
            "host",
            {"waited": 0.0, "interval": 1.0, "processor": all_, "computing": own},
        )
        for number, (device, all_, own) in enumerate(rows)
    ]


def test_processor_time_is_parted_into_computing_and_what_emulation_takes_beside_it() -> (
    None
):
    events = sorted(
        [
            *recorded.make_events(),
            *took(("a", 3.0, 2.0), ("b", 2.5, 2.0), ("a", 0.5, 0.0)),
        ],
        key=lambda e: e.time,
    )
    fidelity = {"processor_seconds": 1.5, "controller_seconds": 0.5}
    record = recorded.make_record(events=events, fidelity=fidelity)
    assert host.processor_time(record) == {
        "computing": 4.0,
        "agents": 2.0,
        "shaper": 1.5,
        "controller": 0.5,
    }
    found = {figure.name: figure.compute(record) for figure in host.METRICS}
    assert found["overhead"] == 1.0
    assert found["processor_agents"] == 2.0


def test_a_run_in_which_nobody_counted_has_no_processor_time() -> None:
    assert host.processor_time(recorded.make_record()) is None
    without_shaper = recorded.make_record(
        events=[*recorded.make_events(), *took(("a", 1.0, 1.0))], fidelity={}
    )
    assert {figure.compute(without_shaper) for figure in host.METRICS} == {None}
