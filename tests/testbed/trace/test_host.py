"""Processor time of the host by purpose."""

from testbed.trace import host
from testbed.trace.events import Event
from tests.helpers import recorded
from tests.testbed.trace.records import in_order, metric_values


def host_event(time: float, device: str, processor: float, computing: float) -> Event:
    """Return a report of an agent's processor seconds, in total and for computations."""
    fields = {"waited": 0.0, "interval": 1.0}
    fields |= {"processor": processor, "computing": computing}
    return Event(time, device, "host", fields)


def test_processor_time_is_divided_into_computations_and_overhead() -> None:
    reports = [
        host_event(1.0, "a", processor=3.0, computing=2.0),
        host_event(2.0, "b", processor=2.5, computing=2.0),
        host_event(3.0, "a", processor=0.5, computing=0.0),
    ]
    fidelity = {"processor_seconds": 1.5, "controller_seconds": 0.5}
    record = recorded.make_record(
        events=in_order(recorded.make_events(), reports), fidelity=fidelity
    )
    # 6 s of agents in all, 4 s of which for computations.
    assert host.processor_time(record) == {
        "computing": 4.0,
        "agents": 2.0,
        "shaper": 1.5,
        "controller": 0.5,
    }
    metrics = metric_values(host.METRICS, record)
    # 2 + 1.5 + 0.5 s beside 4 s of computations.
    assert metrics["overhead"] == 1.0
    assert metrics["processor_agents"] == 2.0


def test_run_without_measurements_has_no_processor_time() -> None:
    assert host.processor_time(recorded.make_record()) is None


def test_processor_time_without_shaper_is_unknown() -> None:
    report = host_event(1.0, "a", processor=1.0, computing=1.0)
    events = [*recorded.make_events(), report]
    record = recorded.make_record(events=events, fidelity={})
    assert set(metric_values(host.METRICS, record).values()) == {None}
