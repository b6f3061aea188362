"""Rounds while devices die, come back, are cut off or slow, and while the server restarts."""

import pytest
import torch

from testbed.prepare import Prepared
from testbed.trace.metrics import metrics
from tests.helpers.server_scenarios import (
    fields_of,
    make_scenario,
    participants_by_round,
    prepare_scenario,
    run_simulated,
)

METHODS = ("federated", "split-learning", "split-federated", "pipelearn")
ALL = ["device1", "device2", "device3"]
UNLIKE = {
    "server": {"speed": "2mflops"},
    "device": {"speed": "200kflops", "count": 2},
    "slow": {"speed": "10kflops"},
}


def faulty(method: str, *faults: dict, options=None, rounds: int = 6):
    """Return a scenario of three devices with rounds of two iterations."""
    chosen = {"local_steps": 2, **(options or {})}
    return make_scenario(
        method, 3, workload={"steps": 2 * rounds}, options=chosen, faults=list(faults)
    )


def round_time(method: str) -> float:
    (first, *_) = fields_of(run_simulated(faulty(method, rounds=1)), "round")
    return first["duration"]


@pytest.mark.parametrize("delay", ["0ms", "2ms", "100ms"])
@pytest.mark.parametrize("method", METHODS)
def test_a_round_takes_what_the_stage_graph_says(method: str, delay: str) -> None:
    network = {"topology": "star", "link": {"rate": "1mbit", "delay": delay}}
    keys = {"workload": {"steps": 6}, "options": {"local_steps": 6}, "network": network}
    spec = make_scenario(method, 3, **keys)
    clients = prepare_scenario(spec).plan.details.clients
    expected = [each.round_time for each in clients.values()]
    together = sum(expected) if method == "split-learning" else max(expected)
    assert fields_of(run_simulated(spec), "round")[0]["duration"] == pytest.approx(
        together, rel=0.03
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_device_that_dies_in_a_round_for_good_is_left_out_of_all_after_it(
    method: str,
) -> None:
    dies = 1.5 * round_time(method)
    outcome = run_simulated(faulty(method, {"kill": "device2", "at": f"{dies}s"}))
    others = ["device1", "device3"]
    assert participants_by_round(outcome) in (
        [ALL, *[others] * 5],
        [*[ALL] * 2, *[others] * 4],
    )
    missed = fields_of(outcome, "missed")
    assert [each["devices"] for each in missed] == [["device2"]]
    durations = [each["duration"] for each in fields_of(outcome, "round")]
    assert max(durations[3:]) < 1.1 * durations[0]


@pytest.mark.parametrize("method", METHODS)
def test_a_device_that_restarts_takes_part_in_the_next_round(method: str) -> None:
    dies = 2.4 * round_time(method)
    outcome = run_simulated(
        faulty(method, {"kill": "device2", "at": f"{dies}s", "for": "50ms"})
    )
    rounds = participants_by_round(outcome)
    assert rounds[:2] == [ALL] * 2
    assert rounds[-1] == ALL
    assert sum(names != ALL for names in rounds) <= 1
    assert all("device2" in each["devices"] for each in fields_of(outcome, "missed"))


@pytest.mark.parametrize("method", METHODS)
def test_a_device_that_is_cut_off_comes_back_when_its_link_does(method: str) -> None:
    length = round_time(method)
    cut = {
        "partition": [["device3"], ["server", "device1", "device2"]],
        "at": f"{1.5 * length}s",
        "for": f"{5 * length}s",
    }
    outcome = run_simulated(
        faulty(method, cut, options={"round_deadline": f"{1.5 * length}s"}, rounds=12)
    )
    rounds = participants_by_round(outcome)
    assert ["device1", "device2"] in rounds
    assert rounds[-1] == ALL


def test_no_update_counts_twice() -> None:
    """Each round's samples are those of the devices that took part in it, each once."""
    length = round_time("federated")
    faults = [
        {"kill": "device1", "at": f"{1.2 * length}s", "for": f"{length}s"},
        {
            "partition": [["device3"], ["server", "device1", "device2"]],
            "at": f"{2.2 * length}s",
            "for": f"{length}s",
        },
        {
            "throttle": {"device": "device2", "slowdown": 5},
            "at": f"{4 * length}s",
            "for": f"{length}s",
        },
    ]
    outcome = run_simulated(
        faulty("federated", *faults, options={"round_deadline": f"{1.5 * length}s"})
    )
    assert [each["round"] for each in fields_of(outcome, "round")] == list(range(6))
    for each in fields_of(outcome, "round"):
        assert set(each["samples"].values()) == {32}


@pytest.mark.parametrize("method", METHODS)
def test_a_server_that_restarts_goes_on_from_the_global_model_on_its_disk(
    method: str,
) -> None:
    dies = 3.5 * round_time(method)
    outcome = run_simulated(
        faulty(method, {"kill": "server", "at": f"{dies}s", "for": "200ms"})
    )
    numbers = [each["round"] for each in fields_of(outcome, "round")]
    assert numbers == list(range(6))
    assert participants_by_round(outcome)[-1] == ALL


def test_a_restart_of_the_server_between_updates_changes_nothing_that_is_learnt() -> (
    None
):
    """Without momentum nothing is lost: the round is trained again from the same weights on the same samples."""
    plain = {"learning_rate": 0.1}
    keys = {
        "workload": {"steps": 12, "training": {"optimizer": plain}},
        "options": {"local_steps": 2},
    }
    whole = run_simulated(make_scenario("federated", 3, **keys))
    killed = {
        "kill": "server",
        "at": f"{2.5 * fields_of(whole, 'round')[0]['duration']}s",
        "for": "200ms",
    }
    one, other = (
        whole.weights,
        run_simulated(make_scenario("federated", 3, faults=[killed], **keys)).weights,
    )
    assert one is not None
    assert other is not None
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name])


def test_a_round_waits_for_as_many_updates_as_it_needs() -> None:
    length = round_time("federated")
    slow = {
        "throttle": {"device": "device2", "slowdown": 10},
        "at": f"{1.1 * length}s",
        "for": f"{12 * length}s",
    }
    options = {"round_deadline": f"{1.5 * length}s", "min_devices": 3}
    outcome = run_simulated(faulty("federated", slow, options=options, rounds=3))
    assert participants_by_round(outcome) == [ALL] * 3
    hasty = run_simulated(
        faulty(
            "federated", slow, options={"round_deadline": f"{1.5 * length}s"}, rounds=3
        )
    )
    assert participants_by_round(hasty)[1] == ["device1", "device3"]


def test_a_run_with_faults_is_the_same_each_time() -> None:
    length = round_time("pipelearn")
    faults = [{"kill": "device1", "at": f"{1.2 * length}s", "for": f"{length}s"}]
    one, other = (run_simulated(faulty("pipelearn", *faults)) for _ in range(2))
    assert participants_by_round(one) == participants_by_round(other)
    assert one.weights is not None
    assert other.weights is not None
    assert all(
        torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items()
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_default_deadline_waits_for_devices_whose_messages_take_far_longer_than_planned(
    method: str,
) -> None:
    """Planners do not know that the server's access is shared: here rounds take many times the planned time."""
    devices = {"server": {"speed": "1gflops", "downlink": "1mbit", "uplink": "1mbit"}}
    devices |= {"device": {"speed": "1gflops", "count": 12}}
    spec = make_scenario(
        method,
        devices=devices,
        workload={"steps": 4, "batch_size": 8},
        options={"local_steps": 2},
    )
    planned = max(
        client.round_time
        for client in prepare_scenario(spec).plan.details.clients.values()
    )
    outcome = run_simulated(spec)
    if method != "split-learning":  # there devices take turns
        assert fields_of(outcome, "round")[1]["duration"] > 3 * planned
    assert fields_of(outcome, "missed") == []
    assert all(len(names) == 12 for names in participants_by_round(outcome))


def test_an_overhead_of_seconds_in_rounds_of_milliseconds_loses_no_update() -> None:
    """As of a busy host: one device of three answers seconds late."""
    keys = {
        "workload": {"steps": 12},
        "options": {"local_steps": 2},
        "server": "1gflops",
        "speed": "1gflops",
    }
    slow = {
        "throttle": {"device": "device2", "slowdown": 5000},
        "at": "150ms",
        "for": "60s",
    }
    outcome = run_simulated(make_scenario("federated", 3, faults=[slow], **keys))
    assert fields_of(outcome, "round")[-1]["duration"] > 1
    assert fields_of(outcome, "missed") == []


@pytest.mark.parametrize("method", METHODS)
def test_a_device_that_is_late_is_not_invited_while_it_still_computes(
    method: str,
) -> None:
    options = {"local_steps": 2, "round_deadline": "1s"}
    outcome = run_simulated(
        make_scenario(method, devices=UNLIKE, workload={"steps": 60}, options=options)
    )
    computed = [
        event.fields for event in outcome.events.of("compute") if event.device == "slow"
    ]
    invited = [
        event.time
        for event in outcome.events.of("receive")
        if (event.device, event.fields["message"]) == ("slow", "begin")
    ]
    assert len(invited) > 1
    for time in invited:
        assert not [
            span
            for span in computed
            if span["start"] < time - 1e-6 < span["start"] + span["duration"] - 2e-6
        ]


def judged(spec) -> tuple[dict, Prepared]:
    ready = prepare_scenario(spec)
    return metrics(
        run_simulated(spec), ready.experiment, ready.plan, ready.method.declared
    ), ready


def test_updates_that_are_missed_without_a_fault_are_named_by_the_verdict() -> None:
    spec = make_scenario(
        "federated",
        devices=UNLIKE,
        workload={"steps": 8},
        options={"round_deadline": "1s"},
    )
    found, ready = judged(spec)
    assert found["missed_updates"] > 0
    assert "though no fault struck" in found["verdict"]["summary"]
    assert (
        found["verdict"]["kind"] == "prediction"
    )  # the scenario asks for this deadline
    default = make_scenario("federated", devices=UNLIKE, workload={"steps": 8})
    adapted = prepare_scenario(default)
    untrusted = metrics(
        run_simulated(spec), adapted.experiment, ready.plan, ready.method.declared
    )["verdict"]
    assert untrusted["kind"] == "not trusted"
    assert "though no fault struck" in untrusted["reasons"][0]
    assert judged(default)[0]["missed_updates"] == 0


def test_nobody_both_takes_part_in_a_round_and_misses_it() -> None:
    length = round_time("federated")
    slow = {
        "throttle": {"device": "device2", "slowdown": 10},
        "at": f"{1.1 * length}s",
        "for": f"{12 * length}s",
    }
    options = {"round_deadline": f"{1.5 * length}s", "min_devices": 3}
    found, _ = judged(faulty("federated", slow, options=options, rounds=3))
    assert found["missed_updates"] == 0
    for item in found["round_list"]:
        assert not set(item["missed"]) & set(item["samples"])
