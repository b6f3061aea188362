from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.network.link import Link
from testbed.trace.disturbances import recoveries, strikes
from testbed.trace.events import Event
from testbed.trace.metrics import metrics
from testbed.trace.outcome import LinkMeasurement
from testbed.wire.framing import wire_bytes
from tests.helpers import recorded


def figures(**changes: Any) -> dict[str, Any]:
    return metrics(recorded.outcome(**changes), recorded.trial().experiment, recorded.plan())


def calm(**changes: Any) -> dict[str, Any]:
    outcome = recorded.outcome(**({"events": recorded.events(faulty=False)} | changes))
    return metrics(outcome, recorded.trial(faults=()).experiment, recorded.plan())


def test_a_loss_that_is_no_number_is_told_as_diverged() -> None:
    assert "diverged" not in figures() or figures()["diverged"] is None
    found = recorded.events(faulty=False)
    last = max(index for index, event in enumerate(found) if event.event == "evaluate")
    event = found[last]
    found[last] = Event(event.time, event.device, event.event, {**event.fields, "loss": float("nan")})
    assert calm(events=found)["diverged"] is True


def test_learning_and_pace_of_the_recorded_run() -> None:
    found = figures()
    assert found["accuracy"] == 0.95
    assert found["test_loss"] == 0.25
    assert found["loss_first"] == 2.0
    assert found["loss"] == pytest.approx(0.4)
    assert (found["steps"], found["steps_repeated"], found["samples"]) == (5, 1, 160)
    assert found["duration"] == 8.6
    assert found["samples_per_second"] == pytest.approx(160 / 8.6)
    assert found["predicted_step_time"] == 0.9


def test_steady_steps_leave_out_the_first_and_the_disturbed() -> None:
    found = figures()
    # Six step events: the first is warm-up, the third ends after the recovery and holds the fault.
    assert [row["steady"] for row in found["series"]["steps"]] == [False, True, False, True, True, True]
    assert found["series"]["steps"][2]["seconds"] == pytest.approx(3.0)
    assert found["step_time"] == pytest.approx(1.0)
    assert found["step_time_mean"] == pytest.approx(1.0)
    assert found["steady_steps"] == 4


def test_steps_with_an_evaluation_or_an_odd_batch_are_not_steady() -> None:
    events = recorded.events(faulty=False)
    events.append(Event(1.5, "a", "evaluate", {"step": 0, "accuracy": 0.1, "loss": 2.0}))
    last = next(event for event in reversed(events) if event.event == "step")
    events[events.index(last)] = Event(last.time, "a", "step", {**last.fields, "samples": 7})
    found = calm(events=sorted(events, key=lambda event: event.time))
    assert [row["steady"] for row in found["series"]["steps"]] == [False, False, True, True, False]


def test_without_any_steady_step_all_count() -> None:
    found = calm(events=[Event(0.5, "a", "step", {"step": 0, "loss": 1.0, "samples": 8})])
    assert found["steady_steps"] == 0
    assert found["step_time"] == 0.5


def test_recovery_runs_from_strike_over_detection_to_resumption() -> None:
    found = figures()
    assert (found["faults"], found["recoveries"], found["unrecovered"]) == (1, 1, 0)
    assert found["recovery_time"] == pytest.approx(4.0 - 2.32)
    assert found["detection_time"] == pytest.approx(3.0 - 2.32)
    assert found["resume_time"] == pytest.approx(1.0)
    assert found["recovery_list"][0]["missing"] == ["b"]
    fault = found["fault_list"][0]
    assert (fault["struck"], fault["undone"], fault["recovered"]) == (2.32, 3.3, 4.0)
    assert fault["late"] == pytest.approx(0.02)


def test_device_times_of_the_recorded_run() -> None:
    found = figures()["devices"]
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
        assert device["compute"] + device["communicate"] + device["down"] + device["idle"] == pytest.approx(8.6)
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
        Event(2.0, "a", "compute", {"span": "forward", **fields, "flops": 1.0, "busy": 0.1, "deficit": 0.0}),
        Event(
            3.0, "a", "send", {"peer": "b", "message": "m", "bytes": 10, "start": 0.0, "duration": 3.0, "queued": 1.0}
        ),
        Event(4.0, "a", "state", {"state": "finished"}),
    ]
    device = calm(events=events)["devices"]["a"]
    assert (device["compute"], device["send"], device["communicate"], device["idle"]) == (2.0, 2.0, 1.0, 1.0)


def test_links_show_requested_and_measured_and_their_use() -> None:
    there = figures()["links"][0]
    assert (there["source"], there["destination"], there["messages"], there["bytes"]) == ("a", "b", 7, 700_000)
    assert there["requested"]["rate"] == 8e6
    assert there["measured"] == {"rate": 7.9e6, "delay": 0.0101, "loss": 0.0, "packets": 50}
    assert there["used_share"] == pytest.approx(7 * wire_bytes(100_000) * 8 / 8e6 / 8.6)


def test_a_cast_is_one_transmission_but_uses_every_link() -> None:
    cast = {"peers": ["b"], "message": "hello", "bytes": 50, "start": 0.0, "duration": 0.1}
    found = calm(events=[Event(0.1, "a", "cast", cast), Event(1.0, "a", "state", {"state": "finished"})])
    assert found["bytes_sent"] == 50
    assert found["links"][0]["messages"] == 1


def test_reception_is_the_share_of_casts_heard_by_those_they_were_for() -> None:
    cast = {"message": "hello", "bytes": 50, "start": 0.0, "duration": 0.1}
    heard = {"peer": "a", "message": "hello", "bytes": 50, "start": 0.0, "duration": 0.1, "decode": 0.0}
    events = [
        Event(0.1, "a", "cast", {**cast, "peers": ["b"], "number": 0}),
        Event(0.2, "b", "receive", {**heard, "cast": 0}),
        Event(0.5, "b", "receive", heard),
        Event(0.6, "a", "cast", {**cast, "peers": ["b"], "duration": 0.3, "number": 1}),
        Event(1.0, "a", "state", {"state": "finished"}),
    ]
    found = calm(events=events)
    assert (found["casts"], found["reception"]) == (2, 0.5)
    assert found["cast_time"] == pytest.approx(0.2)
    assert (found["links"][0]["casts"], found["links"][0]["casts_heard"]) == (2, 1)
    assert "casts" not in calm(events=[events[-1]])


def test_latencies_of_inference() -> None:
    events = [
        Event(float(number), "a", "request", {"request": number, "latency": number / 100}) for number in range(1, 101)
    ]
    found = calm(events=events)
    assert found["requests"] == 100
    assert found["latency"] == pytest.approx(0.505)
    assert found["latency_p95"] == pytest.approx(0.9505)
    assert found["latency_max"] == 1.0
    assert found["requests_per_second"] == pytest.approx(1.0)
    assert "step_time" not in found


def test_each_device_counts_its_own_requests() -> None:
    events = [Event(1.0 + place, name, "request", {"request": 0, "latency": 0.5}) for place, name in enumerate("ab")]
    assert calm(events=events)["requests"] == 2


def test_a_request_that_is_asked_again_counts_once_as_it_ended() -> None:
    events = [
        Event(1.0, "a", "request", {"request": 0, "latency": 0.5}),
        Event(2.0, "a", "failed", {"request": 1, "error": "b was lost", "after": 0.5}),
        Event(4.0, "a", "request", {"request": 0, "latency": 0.9}),
        Event(5.0, "a", "request", {"request": 1, "latency": 0.9}),
        Event(6.0, "a", "failed", {"request": 2, "error": "b was lost", "after": 0.5}),
    ]
    found = calm(events=events)
    assert (found["requests"], found["requests_failed"], found["latency"]) == (2, 1, 0.9)
    # From 3.1 to 5.0, two of them, and 0.9 s each is what the plan promises.
    assert found["over_predicted"] == pytest.approx(1.9 / 2 / 0.9)


def test_a_trusted_run() -> None:
    judged = figures()["verdict"]
    assert judged["kind"] == "trusted", judged
    assert judged["reasons"] == []
    assert {check["name"] for check in judged["checks"]} == {
        "course",
        "events",
        "faults",
        "links",
        "host",
        "recovery",
    }


def test_a_simulation_is_a_prediction() -> None:
    found = figures(runtime="simulate", links=[], fidelity={})
    assert found["verdict"]["kind"] == "prediction"
    assert found["trusted"] is True


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": "failed", "error": "worker1: out of memory"}, "the run failed: worker1: out of memory"),
        ({"status": "timed out"}, "the run timed out"),
        ({"status": "interrupted"}, "the run was interrupted"),
        ({"links": []}, "no link was measured"),
        ({"fidelity": {"host_stolen": 0.1}}, "a hypervisor kept 10.0% of the processors' time for others"),
        (
            {"fidelity": {"queues": {"a": {"queue_dropped": 2, "sender_drops": 5}, "b": {"user_dropped": 1}}}},
            "the emulation dropped 3 packets for want of time, most at a",
        ),
        ({"fidelity": {"lateness": {"p50": 0.0, "p99": 0.02}}}, "delayed by 20.00 ms more than asked"),
        ({"events": []}, "no events from a, b"),
    ],
)
def test_what_makes_a_run_untrusted(changes: dict[str, Any], reason: str) -> None:
    found = figures(**changes)
    assert found["verdict"]["kind"] == "not trusted"
    assert found["trusted"] is False
    assert reason in found["verdict"]["summary"]


def test_a_link_out_of_tolerance_names_itself() -> None:
    bad = LinkMeasurement("a", "b", Link(rate=1e6), rate=5e5, problem="rate 0.5 mbit instead of 1 mbit")
    assert "link a -> b is out of tolerance: rate 0.5 mbit" in figures(links=[bad])["verdict"]["summary"]


@pytest.mark.parametrize("key", ["deficit", "late"])
def test_pacing_that_the_host_could_not_keep(key: str) -> None:
    events = [
        Event(event.time, event.device, event.event, {**event.fields, key: 0.1}) if event.event == "compute" else event
        for event in recorded.events()
    ]
    found = figures(events=events)
    assert found["deficit_share"] == pytest.approx(0.2), "a computes twice a step of one second"
    assert found["host_share"] > 0.1
    [reason] = found["verdict"]["reasons"]
    assert "by computing late" in reason
    assert reason.endswith("its processors were busy for 40% of the time, all of them at once for 2%")


def test_waiting_for_a_processor_is_told_per_device() -> None:
    # Half a second of waiting in each of two intervals of a second, as far as they are undisturbed.
    waits = [Event(time, "b", "host", {"waited": 0.5, "interval": 1.0}) for time in (2.0, 3.0)]
    found = figures(events=sorted([*recorded.events(), *waits], key=lambda event: event.time))
    steady = [row for row in found["series"]["steps"] if row["steady"]]
    within = sum(max(0.0, min(row["time"], 3.0) - max(row["time"] - row["seconds"], 1.0)) for row in steady)
    assert within > 0
    share = 0.5 * within / sum(row["seconds"] for row in steady)
    assert found["devices"]["b"]["waited_share"] == pytest.approx(share)


def test_a_busy_host_that_did_no_damage_is_trusted() -> None:
    fidelity = {"host_load": 0.9, "host_saturated": 0.8, "queues": {"a": {"sender_drops": 7, "queue_dropped": 0}}}
    assert figures(fidelity=fidelity)["trusted"]


def test_a_recovery_that_the_host_prolonged() -> None:
    slow = {"span": "load", "start": 3.4, "duration": 0.5, "flops": 0.0, "busy": 0.5, "deficit": 0.5}
    events = sorted([*recorded.events(), Event(3.9, "b", "compute", slow)], key=lambda event: event.time)
    found = figures(events=events)
    assert found["recovery_list"][0]["deficit"] == pytest.approx(0.5)
    assert found["deficit_share"] == pytest.approx(0.01), "what happens in a recovery says nothing of undisturbed steps"
    assert found["verdict"]["reasons"] == ["computing slower than asked made up 29.8% of a recovery (at most 10%)"]


def test_a_late_fault_and_one_that_never_came() -> None:
    late = [
        Event(event.time, event.device, event.event, {**event.fields, "intended": 1.0})
        if event.fields.get("phase") == "strike"
        else event
        for event in recorded.events()
    ]
    assert "kill of b struck 1.32 s late" in figures(events=late)["verdict"]["summary"]
    assert "never struck: kill" in figures(events=recorded.events(faulty=False))["verdict"]["summary"]
    slow = [
        Event(event.time, event.device, event.event, {**event.fields, "began": 1.1})
        if event.fields.get("phase") == "strike"
        else event
        for event in late
    ]
    # A device that boots or hands over takes its time: what counts is when it began.
    assert "late" not in figures(events=slow)["verdict"]["summary"]
    assert figures(events=slow)["fault_list"][0]["struck"] == 1.1


def test_late_changes_of_traces_and_flaps() -> None:
    flap = {"flap": {"between": ["a", "b"], "down": "60ms", "up": "1s"}, "at": "1s"}

    def verdict(*changes: Event) -> dict[str, Any]:
        events = sorted([*recorded.events(faulty=False), *changes], key=lambda event: event.time)
        found = metrics(recorded.outcome(events=events), recorded.trial(faults=[flap]).experiment, recorded.plan())
        return {check["name"]: check for check in found["verdict"]["checks"]}

    def flapped(time: float, phase: str, intended: float) -> Event:
        fields = {"action": "flap", "target": "a <-> b", "phase": phase, "intended": intended}
        return Event(time, "testbed", "fault", fields)

    traced = Event(2.04, "testbed", "trace", {"what": "link a->b rate", "value": "1mbit", "intended": 2.0})
    down, up = flapped(1.02, "strike", 1.0), flapped(1.075, "undo", 1.06)
    good = verdict(traced, down, up)
    assert good["trace"]["ok"]
    assert good["trace"]["detail"] == "1 changes by the trace, the latest 40 ms late"
    assert good["flaps"]["ok"]
    late = Event(3.06, "testbed", "trace", {**traced.fields, "intended": 3.0})
    bad = verdict(traced, late, down, flapped(1.095, "undo", 1.06))
    assert bad["trace"]["detail"] == "1 of 2 changes by the trace, the latest 60 ms late (at most 50 ms)"
    assert bad["flaps"]["detail"] == "1 of 2 changes by the flaps, the latest 35 ms late (at most 30 ms)"
    assert (bad["trace"]["ok"], bad["flaps"]["ok"]) == (False, False)


def test_what_is_done_by_hand_is_neither_late_nor_missed() -> None:
    def flapped(time: float, phase: str) -> Event:
        return Event(time, "testbed", "fault", {"action": "flap", "target": "a <-> b", "phase": phase})

    events = [event for event in recorded.events(faulty=False) if event.event != "receive"]
    by_hand = sorted([*events, flapped(1.0, "strike"), flapped(1.5, "undo")], key=lambda event: event.time)
    found = calm(events=by_hand)
    assert found["verdict"]["trusted"]
    assert [(row["action"], row["late"], row["undone"]) for row in found["fault_list"]] == [("flap", 0.0, 1.5)]


def test_a_simulation_says_what_of_the_links_it_leaves_out() -> None:
    network = {"link": {"rate": "8mbit", "delay": "10ms", "limit": 40, "duplicate": "1%"}}
    outcome = recorded.outcome(runtime="simulate", links=[], fidelity={})
    found = metrics(outcome, recorded.trial(network=network).experiment, recorded.plan())["verdict"]
    assert found["summary"].endswith("not in the model: queue limits and packets that arrive twice")
    assert found["kind"] == "prediction"
    assert "model" not in {
        check["name"] for check in figures(runtime="simulate", links=[], fidelity={})["verdict"]["checks"]
    }


def test_receptions_missing_from_the_log() -> None:
    events = [event for event in recorded.events(faulty=False) if event.event != "receive"]
    assert "lacks the reception of 10 of 10 messages" in calm(events=events)["verdict"]["summary"]


def test_a_fault_that_is_never_undone_disturbs_until_the_end() -> None:
    events = [event for event in recorded.events() if event.event != "recovery" and event.fields.get("phase") != "undo"]
    found = figures(events=events)
    assert found["fault_list"][0]["undone"] is None
    assert [row["steady"] for row in found["series"]["steps"]] == [False, True, False, False, False, False]


def test_heal_undoes_partitions_and_degradations() -> None:
    fault = {"phase": "strike", "intended": 0.5}
    events = [
        *recorded.events(faulty=False),
        Event(0.5, "testbed", "fault", {**fault, "action": "partition", "target": "a | b"}),
        Event(0.9, "testbed", "fault", {**fault, "action": "heal", "target": "all"}),
    ]
    found = calm(events=sorted(events, key=lambda event: event.time))
    assert [(item["action"], item["undone"]) for item in found["fault_list"]] == [("partition", 0.9), ("heal", None)]
    assert found["faults"] == 1


def test_a_run_that_failed_before_anything_happened() -> None:
    found = figures(events=[], status="failed", error="no image", links=[], fidelity={})
    assert found["duration"] == 0
    assert found["steps"] == 0
    assert "accuracy" not in found
    json.dumps(found, allow_nan=False)


def test_a_diverged_loss_is_still_json() -> None:
    events = [Event(1.0, "a", "step", {"step": 0, "loss": float("nan"), "samples": 8})]
    assert calm(events=events)["loss"] is None
    json.dumps(figures(), allow_nan=False)


@given(
    st.lists(
        st.tuples(st.sampled_from(["compute", "send", "receive"]), st.floats(0, 10), st.floats(0, 5), st.floats(0, 5)),
        max_size=20,
    )
)
def test_the_parts_of_a_device_always_make_up_the_duration(work: list[tuple[str, float, float, float]]) -> None:
    events = [
        Event(
            start + length, "a", kind, {"start": start, "duration": length, "queued": queued, "peer": "b", "bytes": 1}
        )
        for kind, start, length, queued in work
    ]
    strike = {"action": "pause", "target": "a", "intended": 3.0}
    events += [
        Event(3.0, "testbed", "fault", {**strike, "phase": "strike"}),
        Event(4.0, "testbed", "fault", {**strike, "phase": "undo"}),
        Event(9.0, "a", "state", {"state": "finished"}),
    ]
    device = calm(events=sorted(events, key=lambda event: event.time))["devices"]["a"]
    assert device["compute"] + device["communicate"] + device["down"] + device["idle"] == pytest.approx(9.0)
    assert device["down"] == pytest.approx(1.0)


def test_a_recovery_is_not_blamed_on_a_fault_that_was_outlived_before() -> None:
    def fault(time: float, action: str, target: str, phase: str) -> Event:
        return Event(time, "testbed", "fault", {"action": action, "target": target, "phase": phase, "intended": time})

    events = [
        fault(45, "kill", "b", "strike"),
        Event(49, "a", "recovery", {"phase": "detected", "missing": ["b"]}),
        fault(55, "kill", "b", "undo"),
        Event(57, "a", "recovery", {"phase": "resumed", "step": 4}),
        fault(110, "partition", "a | b,c", "strike"),
        Event(114, "a", "recovery", {"phase": "detected", "missing": ["b", "c"]}),
        fault(125, "partition", "a | b,c", "undo"),
        Event(126, "a", "recovery", {"phase": "resumed", "step": 8}),
    ]
    assert [(found.struck, found.duration) for found in recoveries(events)] == [(45, 12), (110, 16)]
    lasting = [event for event in events if event.time not in (55, 110, 125)]
    assert [found.struck for found in recoveries(lasting)] == [45, 45], "it was never undone, and nothing else struck"


def test_two_faults_at_one_instant_were_both_outlived() -> None:
    events = [
        *(
            Event(at, "testbed", "fault", {"action": "kill", "target": name, "phase": "strike", "intended": 10})
            for at, name in ((10.01, "b"), (10.05, "c"))
        ),
        Event(10.06, "testbed", "fault", {"action": "throttle", "target": "a", "phase": "strike", "intended": 10}),
        Event(14, "a", "recovery", {"phase": "detected", "missing": ["b", "c"]}),
        Event(17, "a", "recovery", {"phase": "resumed", "step": 4}),
    ]
    assert [strike.recovered for strike in strikes(events)] == [17, 17, None], "nobody recovers from a throttle"


def test_clocks_of_several_hosts_that_are_not_known_well_make_a_run_untrusted() -> None:
    near = calm(fidelity={"clocks": {"a": 1e-4, "b": 9e-4}})
    assert {
        "name": "clocks",
        "ok": True,
        "detail": "the clocks of 2 hosts are known to 0.90 ms, that of b the least",
    } in near["verdict"]["checks"]
    far = calm(fidelity={"clocks": {"a": 1e-4, "b": 4e-3}})
    assert "known to 4.00 ms, that of b the least (at most 1 ms)" in far["verdict"]["summary"]
    assert "clocks" not in [check["name"] for check in calm()["verdict"]["checks"]]
