"""What each device spent its time on."""

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


def test_device_times_of_the_recorded_run() -> None:
    found = recorded_metrics()["devices"]
    a, b = found["a"], found["b"]
    # a computes 0.4 s in each of six whole steps and 0.2 s in the one that broke off.
    assert a["compute"] == pytest.approx(6 * 0.4 + 0.2)
    assert a["send"] == pytest.approx(7 * 0.1)
    assert a["receive"] == pytest.approx(6 * 0.09)
    assert a["down"] == 0
    # b's span of step 2 was cut off by the kill after 0.02 s; it was gone until it said "started".
    assert b["compute"] == pytest.approx(6 * 0.4 + 0.02)
    assert b["down"] == pytest.approx(3.4 - 2.32)
    for device in (a, b):
        assert device["compute"] + device["communicate"] + device["down"] + device[
            "idle"
        ] == pytest.approx(8.6)
        assert device["idle_share"] == pytest.approx(device["idle"] / 8.6)
    assert a["bytes_sent"] == 700_000
    assert b["bytes_received"] == 700_000
    assert b["deficit"] == pytest.approx(0.06)
    # Four undisturbed steps of one second, 0.01 s lost in each.
    assert b["deficit_share"] == pytest.approx(0.04 / 4)
    assert a["units"] == [0, 1]


def test_sending_while_computing_is_counted_in_both_but_not_in_idle() -> None:
    fields = {"start": 0.0, "duration": 2.0}
    events = [
        Event(
            2.0,
            "a",
            "compute",
            {"span": "forward", **fields, "flops": 1.0, "busy": 0.1, "deficit": 0.0},
        ),
        Event(
            3.0,
            "a",
            "send",
            {
                "peer": "b",
                "message": "m",
                "bytes": 10,
                "start": 0.0,
                "duration": 3.0,
                "queued": 1.0,
            },
        ),
        Event(4.0, "a", "state", {"state": "finished"}),
    ]
    device = calm_metrics(events=events)["devices"]["a"]
    assert (
        device["compute"],
        device["send"],
        device["communicate"],
        device["idle"],
    ) == (2.0, 2.0, 1.0, 1.0)


@pytest.mark.parametrize("key", ["deficit", "late"])
def test_pacing_that_the_host_could_not_keep(key: str) -> None:
    events = [
        Event(event.time, event.device, event.event, {**event.fields, key: 0.1})
        if event.event == "compute"
        else event
        for event in recorded.make_events()
    ]
    found = recorded_metrics(events=events)
    assert found["deficit_share"] == pytest.approx(0.2), (
        "a computes twice a step of one second"
    )
    assert found["host_share"] > 0.1
    [reason] = found["verdict"]["reasons"]
    assert "by computing late" in reason
    assert reason.endswith(
        "its processors were busy for 40% of the time, all of them at once for 2%"
    )


def test_waiting_for_a_processor_is_told_per_device() -> None:
    # Half a second of waiting in each of two intervals of a second, as far as they are undisturbed.
    waits = [
        Event(time, "b", "host", {"waited": 0.5, "interval": 1.0})
        for time in (2.0, 3.0)
    ]
    found = recorded_metrics(
        events=sorted([*recorded.make_events(), *waits], key=lambda event: event.time)
    )
    steady = [row for row in found["series"]["steps"] if row["steady"]]
    within = sum(
        max(0.0, min(row["time"], 3.0) - max(row["time"] - row["seconds"], 1.0))
        for row in steady
    )
    assert within > 0
    share = 0.5 * within / sum(row["seconds"] for row in steady)
    assert found["devices"]["b"]["waited_share"] == pytest.approx(share)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["compute", "send", "receive"]),
            st.floats(0, 10),
            st.floats(0, 5),
            st.floats(0, 5),
        ),
        max_size=20,
    )
)
def test_the_parts_of_a_device_always_make_up_the_duration(
    work: list[tuple[str, float, float, float]],
) -> None:
    events = [
        Event(
            start + length,
            "a",
            kind,
            {
                "start": start,
                "duration": length,
                "queued": queued,
                "peer": "b",
                "bytes": 1,
            },
        )
        for kind, start, length, queued in work
    ]
    strike = {"action": "pause", "target": "a", "intended": 3.0}
    events += [
        Event(3.0, "testbed", "fault", {**strike, "phase": "strike"}),
        Event(4.0, "testbed", "fault", {**strike, "phase": "undo"}),
        Event(9.0, "a", "state", {"state": "finished"}),
    ]
    device = calm_metrics(events=sorted(events, key=lambda event: event.time))[
        "devices"
    ]["a"]
    assert device["compute"] + device["communicate"] + device["down"] + device[
        "idle"
    ] == pytest.approx(9.0)
    assert device["down"] == pytest.approx(1.0)


def with_devices(record: RunView, **specs: Mapping[str, Any]) -> RunView:
    found = tuple(
        replace(each, **specs.get(each.name, {})) for each in record.experiment.devices
    )
    record.experiment = replace(record.experiment, devices=found)
    return record


def test_energy_is_that_of_the_time_up_and_more_while_computing() -> None:
    record = with_devices(
        recorded.make_record(), a={"watts": (2.0, 5.0)}, b={"watts": (1.0, 3.0)}
    )
    found = devices(record)
    # a computes 2.6 s of 8.6 s; b is down for 1.08 s of them, in which it draws nothing, and computes 2.42 s.
    assert found["a"]["energy"] == pytest.approx(2.0 * 8.6 + 3.0 * 2.6)
    assert found["b"]["energy"] == pytest.approx(1.0 * (8.6 - 1.08) + 2.0 * 2.42)
    energy = next(figure for figure in METRICS if figure.name == "energy")
    assert energy.compute(record) == pytest.approx(
        found["a"]["energy"] + found["b"]["energy"]
    )


def test_energy_of_all_is_known_only_where_it_is_known_of_each() -> None:
    record = with_devices(
        recorded.make_record(), a={"watts": (2.0, 5.0)}, b={"watts": None}
    )
    assert "energy" not in devices(record)["b"]
    assert (
        next(figure for figure in METRICS if figure.name == "energy").compute(record)
        is None
    )


def test_what_the_last_report_of_memory_says_is_the_most_that_was_held() -> None:
    reports = [
        Event(1.0, "b", "memory", {"weights": 100, "activations": 10}),
        Event(2.0, "b", "memory", {"weights": 100, "activations": 40}),
    ]
    found = calm_metrics(
        events=sorted(
            [*recorded.make_events(faulty=False), *reports],
            key=lambda event: event.time,
        )
    )["devices"]
    assert (found["b"]["weights"], found["b"]["activations"]) == (100, 40)
    assert "weights" not in found["a"]


def test_a_late_processor_is_one_of_several() -> None:
    one = devices(recorded.make_calm_record())["b"]["deficit_share"]
    two = devices(with_devices(recorded.make_calm_record(), b={"processors": 2}))["b"][
        "deficit_share"
    ]
    assert one == pytest.approx(0.01), "0.01 s in each step of a second"
    assert two == pytest.approx(one / 2)


def test_a_device_that_does_nothing_is_idle_and_counts_in_no_mean_unless_the_plan_has_it() -> (
    None
):
    record = recorded.make_calm_record()
    spare = replace(record.experiment.devices[0], name="spare")
    record.experiment = replace(
        record.experiment, devices=(*record.experiment.devices, spare)
    )
    found = devices(record)
    assert found["spare"]["idle_share"] == 1.0
    assert "units" not in found["spare"]
    means = {figure.name: figure.compute(record) for figure in METRICS}
    assert means["idle_share"] == pytest.approx(
        (found["a"]["idle_share"] + found["b"]["idle_share"]) / 2
    )


def test_a_run_of_no_time_has_shares_of_zero() -> None:
    for row in devices(recorded.make_record(events=[], status="failed")).values():
        assert {row[name] for name in row if name.endswith("_share")} == {0.0}


def test_every_figure_of_a_device_has_a_kind() -> None:
    described = {"profile", "speed", "units"}
    memory = Event(1.0, "a", "memory", {"weights": 100, "activations": 10})
    record = with_devices(
        recorded.make_record(events=[memory, *recorded.make_events()]),
        a={"watts": (2.0, 5.0)},
    )
    assert devices(record)["a"].keys() - described == OF_DEVICES.keys()


def test_each_of_many_devices_is_as_it_would_be_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for record in (recorded.make_record, recorded.make_calm_record):
        together = devices(record())
        with monkeypatch.context() as patch:
            patch.setattr("testbed.trace.devices._TOGETHER", 1)
            assert devices(record()) == together


def test_many_devices_take_no_longer_each_than_a_few() -> None:
    names = [f"client{number}" for number in range(16_000)]
    fields = {"span": "forward", "start": 0.0, "duration": 1.0}
    record = recorded.make_record(
        events=[Event(1.0, name, "compute", fields) for name in names]
    )
    spec = record.experiment.devices[0]
    specs = tuple(replace(spec, name=name) for name in names)
    record.experiment = replace(record.experiment, devices=specs)
    assignments = tuple(
        Assignment(device=name, start=0, stop=1, memory=1.0) for name in names
    )
    record.plan = Plan(
        method="federated", coordinator=names[0], assignments=assignments
    )
    began = process_time()
    assert [
        figure.compute(record) for figure in METRICS if figure.name == "compute_share"
    ] == [1.0]
    assert process_time() - began < 2
