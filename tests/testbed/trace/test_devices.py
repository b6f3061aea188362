"""Use of time, traffic and energy of each device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from time import process_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.plan import Assignment, Plan
from testbed.trace.devices import METRICS, OF_DEVICES, devices
from testbed.trace.events import Event
from testbed.trace.record import RunView
from tests.helpers import recorded
from tests.helpers.recorded import calm_metrics, recorded_metrics
from tests.testbed.trace.records import (
    fault_event,
    in_order,
    metric_values,
    with_fields,
)

DURATION = 8.6
"""Seconds of the recorded run with its fault."""


def sum_of_parts(device: dict[str, Any]) -> float:
    parts = ("compute", "communicate", "down", "idle")
    return sum(device[part] for part in parts)


def test_device_times_of_recorded_run() -> None:
    metrics = recorded_metrics()["devices"]
    a, b = metrics["a"], metrics["b"]
    # a computes 0.4 s in each of six complete steps, and 0.2 s in the interrupted one.
    assert a["compute"] == pytest.approx(6 * 0.4 + 0.2)
    assert a["send"] == pytest.approx(7 * 0.1)
    assert a["receive"] == pytest.approx(6 * 0.09)
    assert a["down"] == 0
    # The kill at 2.32 s interrupted b's forward pass after 0.02 s; b was down until its event "started" at 3.4 s.
    assert b["compute"] == pytest.approx(6 * 0.4 + 0.02)
    assert b["down"] == pytest.approx(3.4 - 2.32)
    for device in (a, b):
        assert sum_of_parts(device) == pytest.approx(DURATION)
        assert device["idle_share"] == pytest.approx(device["idle"] / DURATION)
    assert a["units"] == [0, 1]


def test_device_traffic_and_deficit_of_recorded_run() -> None:
    metrics = recorded_metrics()["devices"]
    # Seven messages of 100 kB.
    assert metrics["a"]["bytes_sent"] == 700_000
    assert metrics["b"]["bytes_received"] == 700_000
    # Six complete computations of b with a deficit of 0.01 s.
    assert metrics["b"]["deficit"] == pytest.approx(0.06)
    # Four undisturbed steps of 1 s with 0.01 s each.
    assert metrics["b"]["deficit_share"] == pytest.approx(0.04 / 4)


def test_sending_during_computation_does_not_count_as_communication() -> None:
    computation = {
        "span": "forward",
        "start": 0.0,
        "duration": 2.0,
        "flops": 1.0,
        "busy": 0.1,
        "deficit": 0.0,
    }
    sending = {
        "peer": "b",
        "message": "m",
        "bytes": 10,
        "start": 0.0,
        "duration": 3.0,
        "queued": 1.0,
    }
    events = [
        Event(2.0, "a", "compute", computation),
        Event(3.0, "a", "send", sending),
        Event(4.0, "a", "state", {"state": "finished"}),
    ]
    device = calm_metrics(events=events)["devices"]["a"]
    # The transmission lasts from 1 to 3 s, half of it during the computation.
    assert device["compute"] == 2.0
    assert device["send"] == 2.0
    assert device["communicate"] == 1.0
    assert device["idle"] == 1.0


def is_computation(event: Event) -> bool:
    return event.event == "compute"


@pytest.mark.parametrize("key", ["deficit", "late"])
def test_late_computations_make_run_untrusted(key: str) -> None:
    events = with_fields(recorded.make_events(), is_computation, **{key: 0.1})
    metrics = recorded_metrics(events=events)
    # a computes twice in a step of 1 s.
    assert metrics["deficit_share"] == pytest.approx(2 * 0.1)
    assert metrics["host_share"] > 0.1
    [reason] = metrics["verdict"]["reasons"]
    assert "by computing late" in reason
    assert reason.endswith(
        "its processors were busy for 40% of the time, all of them at once for 2%"
    )


def seconds_within(row: dict[str, Any], begin: float, end: float) -> float:
    """Return the seconds of a step within an interval."""
    start = row["time"] - row["seconds"]
    return max(0.0, min(row["time"], end) - max(start, begin))


def test_waiting_for_processor_is_measured_in_undisturbed_steps() -> None:
    # Half of the time from 1 to 3 s is spent waiting.
    fields = {"waited": 0.5, "interval": 1.0}
    waits = [Event(2.0, "b", "host", fields), Event(3.0, "b", "host", fields)]
    metrics = recorded_metrics(events=in_order(recorded.make_events(), waits))
    steady = [row for row in metrics["series"]["steps"] if row["steady"]]
    measured = sum(seconds_within(row, 1.0, 3.0) for row in steady)
    assert measured > 0
    share = 0.5 * measured / sum(row["seconds"] for row in steady)
    assert metrics["devices"]["b"]["waited_share"] == pytest.approx(share)


ACTIVITIES = st.lists(
    st.tuples(
        st.sampled_from(["compute", "send", "receive"]),
        st.floats(0, 10),
        st.floats(0, 5),
        st.floats(0, 5),
    ),
    max_size=20,
)
"""Name, start, duration and seconds in a queue."""


@given(ACTIVITIES)
def test_parts_of_device_time_add_up_to_duration(
    activities: list[tuple[str, float, float, float]],
) -> None:
    events = []
    for name, start, duration, queued in activities:
        fields = {"start": start, "duration": duration, "queued": queued}
        fields |= {"peer": "b", "bytes": 1}
        events.append(Event(start + duration, "a", name, fields))
    others = [
        fault_event(3.0, "pause", "a"),
        fault_event(4.0, "pause", "a", "undo", intended=3.0),
        Event(9.0, "a", "state", {"state": "finished"}),
    ]
    metrics = calm_metrics(events=in_order(events, others))
    device = metrics["devices"]["a"]
    assert sum_of_parts(device) == pytest.approx(9.0)
    assert device["down"] == pytest.approx(1.0)


def with_devices(record: RunView, **changes: Mapping[str, Any]) -> RunView:
    """Change the properties of some devices of a record."""
    specs = []
    for spec in record.experiment.devices:
        specs.append(replace(spec, **changes.get(spec.name, {})))
    record.experiment = replace(record.experiment, devices=tuple(specs))
    return record


def test_energy_has_idle_power_while_up_and_extra_power_while_computing() -> None:
    record = with_devices(
        recorded.make_record(), a={"watts": (2.0, 5.0)}, b={"watts": (1.0, 3.0)}
    )
    rows = devices(record)
    # a computes for 2.6 s of 8.6 s; b is down for 1.08 s without power, and computes for 2.42 s.
    energy_of_a = 2.0 * DURATION + (5.0 - 2.0) * 2.6
    energy_of_b = 1.0 * (DURATION - 1.08) + (3.0 - 1.0) * 2.42
    assert rows["a"]["energy"] == pytest.approx(energy_of_a)
    assert rows["b"]["energy"] == pytest.approx(energy_of_b)
    total = metric_values(METRICS, record)["energy"]
    assert total == pytest.approx(energy_of_a + energy_of_b)


def test_total_energy_requires_power_of_all_devices() -> None:
    record = with_devices(
        recorded.make_record(), a={"watts": (2.0, 5.0)}, b={"watts": None}
    )
    assert "energy" not in devices(record)["b"]
    assert metric_values(METRICS, record)["energy"] is None


def test_memory_of_device_is_last_reported_peak() -> None:
    # Devices report new peaks only, so the last report is the maximum.
    reports = [
        Event(1.0, "b", "memory", {"weights": 100, "activations": 10}),
        Event(2.0, "b", "memory", {"weights": 100, "activations": 40}),
    ]
    events = in_order(recorded.make_events(faulty=False), reports)
    rows = calm_metrics(events=events)["devices"]
    assert rows["b"]["weights"] == 100
    assert rows["b"]["activations"] == 40
    assert "weights" not in rows["a"]


def test_deficit_share_is_mean_of_processors() -> None:
    def deficit_share_of_b(record: RunView) -> float:
        share: float = devices(record)["b"]["deficit_share"]
        return share

    two_processors = with_devices(recorded.make_calm_record(), b={"processors": 2})
    # 0.01 s in each step of 1 s.
    assert deficit_share_of_b(recorded.make_calm_record()) == pytest.approx(0.01)
    assert deficit_share_of_b(two_processors) == pytest.approx(0.005)


def test_device_without_assignment_is_idle_and_excluded_from_mean() -> None:
    record = recorded.make_calm_record()
    spare = replace(record.experiment.devices[0], name="spare")
    with_spare = (*record.experiment.devices, spare)
    record.experiment = replace(record.experiment, devices=with_spare)
    rows = devices(record)
    assert rows["spare"]["idle_share"] == 1.0
    assert "units" not in rows["spare"]
    mean = (rows["a"]["idle_share"] + rows["b"]["idle_share"]) / 2
    assert metric_values(METRICS, record)["idle_share"] == pytest.approx(mean)


def test_shares_of_run_without_duration_are_zero() -> None:
    for row in devices(recorded.make_record(events=[], status="failed")).values():
        shares = {value for name, value in row.items() if name.endswith("_share")}
        assert shares == {0.0}


def test_every_value_of_device_is_described() -> None:
    without_description = {"profile", "speed", "units"}
    memory = Event(1.0, "a", "memory", {"weights": 100, "activations": 10})
    record = with_devices(
        recorded.make_record(events=[memory, *recorded.make_events()]),
        a={"watts": (2.0, 5.0)},
    )
    assert devices(record)["a"].keys() - without_description == OF_DEVICES.keys()


@pytest.mark.parametrize(
    "make_record", [recorded.make_record, recorded.make_calm_record]
)
def test_devices_in_groups_have_same_values_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch, make_record: Any
) -> None:
    in_one_group = devices(make_record())
    monkeypatch.setattr("testbed.trace.devices._GROUP_BARS", 1)
    assert devices(make_record()) == in_one_group


def test_time_for_metrics_is_linear_in_number_of_devices() -> None:
    computation = {"span": "forward", "start": 0.0, "duration": 1.0}
    spec = recorded.make_record().experiment.devices[0]
    events, specs, assignments = [], [], []
    for number in range(16_000):
        name = f"client{number}"
        events.append(Event(1.0, name, "compute", computation))
        specs.append(replace(spec, name=name))
        assignments.append(Assignment(device=name, start=0, stop=1, memory=1.0))
    record = recorded.make_record(events=events)
    record.experiment = replace(record.experiment, devices=tuple(specs))
    record.plan = Plan(
        method="federated", coordinator="client0", assignments=tuple(assignments)
    )
    (metric,) = [metric for metric in METRICS if metric.name == "compute_share"]
    began = process_time()
    assert metric.compute(record) == 1.0
    # A search of all events for each device would take much longer.
    assert process_time() - began < 2
