"""VersatileFL on the virtual clock: as EdgePipe while nothing is lost, and what it does about losses and failures."""

from __future__ import annotations

import operator
from collections import Counter

import pytest

from testbed.common.errors import InputError
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.trace.metrics import metrics
from testbed_versatilefl.metrics import DECLARED
from testbed_versatilefl.planner import plan
from tests.helpers.runs import fields_of, make_scenario, problem_of, run_simulated

WORKLOAD = {"training": {"optimizer": {"learning_rate": 0.1}}, "steps": 36}
LOSSY = {"link": {"rate": "20mbit", "delay": "2ms", "message_loss": "25%"}}


CNN = {"model": {"name": "cnn", "channels": [6, 7, 8], "hidden": [10, 8]}}


def six_devices(method=(), name="versatile", workload=(), **keys):
    own = {"management_window": 12} if name == "versatile" else {}
    return make_scenario(
        5,
        workload={**WORKLOAD, **dict(workload)},
        method={"name": name, **own, **dict(method)},
        **keys,
    )


def plan_scenario(scenario_file):
    return plan(problem_of(scenario_file)[0])


@pytest.mark.parametrize(
    ("allocation", "keys"),
    [
        ("hybrid", {"backward_granularity": "layer", "result_sharing": "layer"}),
        ("vertical", {"management_window": 20, "backward_granularity": "neuron"}),
        ("horizontal", {}),
        ("horizontal", CNN),
    ],
)
def test_without_losses_versatilefl_equals_edgepipe(allocation, keys):
    keys = dict(keys)
    short = {
        "steps": 12,
        "model": keys.pop("model", {"name": "mlp", "hidden": [12, 10, 8, 8]}),
    }
    versatile = run_simulated(
        six_devices({"allocation": allocation, **keys}, workload=short)
    )
    edgepipe = run_simulated(six_devices({"allocation": allocation}, "edgepipe", short))
    for event in ("step", "evaluate"):
        ours, theirs = fields_of(versatile, event), fields_of(edgepipe, event)
        assert [each["loss"] for each in ours] == pytest.approx(
            [each["loss"] for each in theirs], rel=1e-5
        )


@pytest.mark.parametrize("model", [{}, CNN])
def test_scattered_neurons_learn_the_same(model):
    short = {"steps": 12, **model}
    scattered = fields_of(
        run_simulated(six_devices({"allocation": "random"}, workload=short)), "step"
    )
    together = fields_of(
        run_simulated(six_devices({"allocation": "horizontal"}, workload=short)), "step"
    )
    assert [each["loss"] for each in scattered] == pytest.approx(
        [each["loss"] for each in together], rel=1e-5
    )


def counted(outcome):
    """Return what all devices counted of their layers together."""
    found = Counter()
    for each in fields_of(outcome, "maintenance"):
        found.update(
            {
                name: value
                for name, value in each.items()
                if name not in ("layer", "step", "version")
            }
        )
    return found


def test_each_kind_of_maintenance_can_be_switched_off():
    learns, off = (
        {},
        {"substitution": False, "reuse_gradients": False, "rearrangement": False},
    )
    for kept in ("substitution", "reuse_gradients", "rearrangement", None):
        outcome = run_simulated(
            six_devices(
                {"allocation": "horizontal", **{key: key == kept for key in off}},
                network=LOSSY,
            )
        )
        learns[kept] = counted(outcome)
        assert bool(fields_of(outcome, "rearrangement")) == (kept == "rearrangement")
    assert learns["substitution"]["dropped"] == 0
    assert learns["substitution"]["fresh"] > 10 * learns[None]["fresh"]
    assert learns[None]["dropped"] > 0
    assert {
        kept: counts["reused"] > 0
        for kept, counts in learns.items()
        if kept is not None
    } == {
        "substitution": False,
        "reuse_gradients": learns["reuse_gradients"]["fresh"] > 0
        and learns["reuse_gradients"]["reused"] > 0,
        "rearrangement": False,
    }


def test_metrics_report_losses_by_layer_and_neurons_by_device():
    scenario_file = six_devices(
        {"allocation": "horizontal", "management_window": 12, "thres_fw": "60%"},
        network=LOSSY,
        workload={"steps": 20},
    )
    (trial,) = trials(scenario_file)
    outcome = run_simulated(scenario_file)
    found = metrics(outcome, trial.experiment, plan_scenario(scenario_file), DECLARED)
    sums = {}
    for each in fields_of(outcome, "maintenance"):
        sums.setdefault(str(each["layer"]), Counter()).update(each)
    assert found["layers"].keys() == sums.keys() == {"1", "2", "3", "4", "5"}
    for layer, counts in sums.items():
        assert (
            found["layers"][layer]["substituted_inputs"]
            == counts["missing"] / counts["expected"]
        )
        assert (
            found["layers"][layer]["dropped_batches"]
            == counts["dropped"] / counts["batches"]
        )
    updates = [
        counts["fresh"] + counts["reused"] + counts["idle"] for counts in sums.values()
    ]
    reused = [layer["gradients_reused"] for layer in found["layers"].values()]
    assert sum(map(operator.mul, updates, reused)) / sum(updates) == pytest.approx(
        found["gradients_reused"]
    )
    held = [
        found["devices"][name]["neurons"]
        for name in plan_scenario(scenario_file).details.devices
    ]
    assert sum(held) == 64 + 12 + 10 + 8 + 8 + 10
    assert (
        min(row.get("credibility", 1) for row in found["devices"].values())
        == found["lowest_credibility"]
    )
    assert found["devices"]["source"].keys() >= {"compute", "neurons"}


def test_a_killed_device_is_detected_and_its_neurons_begin_anew_elsewhere():
    scenario_file = six_devices({"allocation": "horizontal"})
    planned = plan_scenario(scenario_file)
    victim = next(
        name for name in planned.details.devices if name != planned.coordinator
    )
    at = 5 * 11 * planned.details.timeslot
    outcome = run_simulated(
        six_devices(
            {"allocation": "horizontal"}, faults=[{"kill": victim, "at": f"{at}s"}]
        )
    )
    assert outcome.status == "finished"
    # It was heard for five steps of the first window, and no more at its end.
    change = fields_of(outcome, "rearrangement")[0]
    assert (change["cause"], change["devices"]) == ("failure", [victim])
    assert change["version"] == 1
    assert change["reset"] > 0
    last = {
        event.device: event.fields["neurons"]
        for event in outcome.events
        if event.event == "arrangement"
    }
    assert (
        sum(neurons for name, neurons in last.items() if name != victim)
        == 64 + 12 + 10 + 8 + 8 + 10
    )
    losses = [each["loss"] for each in fields_of(outcome, "step")]
    assert sum(losses[-10:]) < sum(losses[:10])


def test_nothing_is_maintained_after_the_steps_of_naive_after():
    method = {
        "allocation": "hybrid",
        "naive_after": 15,
        "naive_baseline": "naive-zeros",
    }
    planned = plan_scenario(six_devices(method))
    victim = next(
        name for name in planned.details.devices if name != planned.coordinator
    )
    faults = [{"kill": victim, "at": f"{15 * 4 * planned.details.timeslot}s"}]
    network = {"link": {"rate": "20mbit", "delay": "2ms", "message_loss": "5%"}}
    keys = {"faults": faults, "network": network, "workload": {"steps": 60}}
    naive, maintained = (
        run_simulated(six_devices({**method, "naive_after": steps}, **keys))
        for steps in (15, None)
    )
    before, still = (
        [each["loss"] for each in fields_of(outcome, "step")][:15]
        for outcome in (naive, maintained)
    )
    assert before == still
    assert "failure" in {
        each["cause"] for each in fields_of(maintained, "rearrangement")
    }
    assert "failure" not in {
        each["cause"] for each in fields_of(naive, "rearrangement")
    }
    reused = [
        each["reused"]
        for each in fields_of(naive, "maintenance")
        if "reused" in each and each["step"] > 36
    ]
    assert not reused, "saved gradients are not used any more"
    dropped, blocked = (
        run_simulated(six_devices({**method, "naive_baseline": how}, **keys))
        for how in ("naive", "naive-blocked")
    )
    for outcome, learns in ((naive, True), (dropped, False), (blocked, False)):
        fresh = [
            each.get("fresh", 0)
            for each in fields_of(outcome, "maintenance")
            if each["step"] > 36
        ]
        assert any(fresh) == learns, (
            "with a batch that is nowhere whole training is blocked"
        )


def test_a_retiring_device_hands_over_its_neurons_and_rejoins_with_an_even_share():
    method = {"allocation": "horizontal"}
    planned = plan_scenario(six_devices(method))
    victim = next(
        name for name in planned.details.devices if name != planned.coordinator
    )
    step = 11 * planned.details.timeslot
    faults = [
        {"retire": victim, "at": f"{5 * step}s"},
        {"join": victim, "at": f"{20 * step}s"},
    ]
    outcome = run_simulated(six_devices(method, faults=faults))
    assert outcome.error is None
    retired, joined = fields_of(outcome, "rearrangement")[:2]
    assert (retired["cause"], retired["devices"], retired["reset"]) == (
        "retirement",
        [victim],
        0,
    )
    assert joined["cause"] == "join"
    assert joined["reset"] == 0
    states = [
        event.fields["state"]
        for event in outcome.events
        if event.event == "state" and event.device == victim
    ]
    assert states[:5] == ["up", "started", "finished", "up", "started"]
    held = [
        event.fields["neurons"]
        for event in outcome.events
        if (event.event, event.device) == ("arrangement", victim)
    ]
    assert held[1] == 0
    assert held[-1] == pytest.approx(held[0], abs=6)  # as it is rounded in each layer
    # Nothing is learnt anew: it goes on where the run without them is, but for a batch that was under way.
    still = [
        each["loss"] for each in fields_of(run_simulated(six_devices(method)), "step")
    ]
    losses = [each["loss"] for each in fields_of(outcome, "step")]
    assert losses[:5] == pytest.approx(still[:5], rel=1e-5)
    assert losses[-1] == pytest.approx(still[-1], rel=0.05)


def test_a_leaving_device_stops_waiting_for_a_dead_receiver_at_the_end_of_the_run():
    # With gathered results and final weights the coordinator's program continues after the last slot.
    method = {"allocation": "horizontal", "test_results": "gathered"}
    planned = plan_scenario(six_devices(method))
    coordinator = planned.coordinator
    leaving, dying = [name for name in planned.details.devices if name != coordinator][
        :2
    ]
    step = 11 * planned.details.timeslot
    faults = [
        # Both in one slot: the others do not know yet that the receiver is dead.
        {"kill": dying, "at": f"{20.01 * step}s"},
        {"retire": leaving, "at": f"{20.01 * step}s"},
    ]
    outcome = run_simulated(six_devices(method, faults=faults))
    assert outcome.error is None
    states = [
        event.fields["state"]
        for event in outcome.events
        if event.event == "state" and event.device == leaving
    ]
    assert states == ["up", "started", "finished"]


@pytest.mark.parametrize("scored", ["cast", "gathered"])
def test_a_killed_device_that_restarts_joins_again(scored):
    method = {"allocation": "hybrid", "test_results": scored}
    planned = plan_scenario(six_devices(method))
    victim = next(
        name for name in planned.details.devices if name != planned.coordinator
    )
    step = 4 * planned.details.timeslot
    faults = [
        {"kill": victim, "at": f"{10 * step}s"},
        {"restart": victim, "at": f"{12 * step}s"},
    ]
    outcome = run_simulated(six_devices(method, faults=faults, workload={"steps": 40}))
    assert outcome.error is None
    changes = fields_of(outcome, "rearrangement")
    assert (changes[0]["cause"], changes[0]["devices"]) == ("join", [victim])
    began = [
        event.time
        for event in outcome.events
        if event.event == "begin" and event.device == victim
    ]
    assert max(began) > 13 * step


def test_a_restarted_coordinator_does_not_decide_beside_the_acting_one():
    method = {"allocation": "horizontal"}
    planned = plan_scenario(six_devices(method))
    step = 11 * planned.details.timeslot
    faults = [
        {"kill": planned.coordinator, "at": f"{11.6 * step}s"},
        {"restart": planned.coordinator, "at": f"{30.5 * step}s"},
    ]
    outcome = run_simulated(six_devices(method, faults=faults, workload={"steps": 42}))
    assert outcome.error is None
    changes = fields_of(outcome, "rearrangement")
    assert ("join", [planned.coordinator]) in [
        (each["cause"], each["devices"]) for each in changes
    ]
    versions = [each["version"] for each in changes]
    assert versions == sorted(set(versions))


def test_a_device_is_not_judged_by_the_window_in_which_it_joined():
    method = {"allocation": "hybrid"}
    planned = plan_scenario(six_devices(method))
    victim = planned.details.devices[0]
    step = 4 * planned.details.timeslot
    # Up again in the third step of the window from 36 to 48, before records of the last window have arrived.
    faults = [
        {"kill": victim, "at": f"{11.6 * step}s"},
        {"join": victim, "at": f"{33 * step}s"},
    ]
    outcome = run_simulated(six_devices(method, faults=faults, workload={"steps": 70}))
    (join,) = [
        event.time
        for event in outcome.events
        if event.event == "rearrangement" and event.fields["cause"] == "join"
    ]
    assert 36 < join / step < 36 + planned.details.record_delay
    windows = {}
    for each in fields_of(outcome, "credibility"):
        windows.setdefault(each["window"], set()).add(each["rated_device"])
    assert [victim in windows[window] for window in (2, 3, 4)] == [False, False, True]


def test_a_silent_device_rejoins_once_its_casts_arrive_again():
    method = {"allocation": "hybrid"}
    planned = plan_scenario(six_devices(method))
    victim = planned.details.devices[2]
    window = 12 * planned.details.timeslot * 4
    others = [name for name in planned.details.devices if name != victim]
    links = [pair for other in others for pair in ((victim, other), (other, victim))]

    def lossy(loss, at):
        return [
            {"degrade": {"from": a, "to": b, "message_loss": loss}, "at": f"{at}s"}
            for a, b in links
        ]

    faults = [*lossy("100%", 0.5 * window), *lossy("0%", 4.25 * window)]
    outcome = run_simulated(six_devices(method, faults=faults, workload={"steps": 84}))
    assert outcome.error is None
    changes = [
        (event.time, event.fields)
        for event in outcome.events
        if event.event == "rearrangement"
    ]
    (lost, failure), (again, join) = [
        (at, each) for at, each in changes if each["cause"] in ("failure", "join")
    ]
    assert (failure["devices"], join["devices"]) == ([victim], [victim])
    # Nobody hears it, and yet it lives: what began anew without it has its weights one slot later.
    sent = [
        event.time
        for event in outcome.events
        if event.event == "receive" and event.fields["message"] == "moved"
    ]
    assert failure["reset"] > 0
    assert [at for at in sent if lost < at < lost + 2 * planned.details.timeslot]
    # Out for as long as nobody hears it, in within the window after.
    assert lost < 4.25 * window < again < 5.75 * window
    assert join["reset"] == 0
    held = {
        event.device: event.fields["neurons"]
        for event in outcome.events
        if event.event == "arrangement"
    }
    assert held[victim] > 2
    began = [
        event.time
        for event in outcome.events
        if event.event == "begin" and event.device == victim
    ]
    assert not [at for at in began if lost + 0.5 * window < at < again]
    assert max(began) > again


@pytest.mark.parametrize("when", [{"at": "0.1s"}, {"when": {"event": "test_start"}}])
def test_a_device_without_receptions_does_not_declare_all_others_failed(
    when,
):
    # In tests there are no losses: those that it heard before are the last ones of a window.
    method = {"allocation": "hybrid", "evaluate_every": 12, "test_runs": 10}
    planned = plan_scenario(six_devices(method))
    victim = planned.details.devices[2]
    others = [name for name in planned.details.devices if name != victim]
    if "when" in when:
        when = {"when": {"device": planned.coordinator, **when["when"]}}
    lost = [
        {"degrade": {"from": name, "to": victim, "message_loss": "100%"}, **when}
        for name in others
    ]
    outcome = run_simulated(six_devices(method, faults=lost))
    assert outcome.error is None
    assert not [
        event
        for event in outcome.events
        if event.event == "rearrangement" and event.device == victim
    ]
    assert "failure" not in {
        change["cause"] for change in fields_of(outcome, "rearrangement")
    }


def test_a_group_left_with_no_device_fails_the_run_and_is_named():
    planned = plan_scenario(
        six_devices({"allocation": "vertical", "management_window": 20})
    )
    victim = planned.details.devices[2]
    faults = [{"kill": victim, "at": "0.1s"}]
    outcome = run_simulated(
        six_devices(
            {"allocation": "vertical", "management_window": 20},
            faults=faults,
            workload={"steps": 80},
        )
    )
    assert outcome.status == "failed"
    assert outcome.error.endswith(
        f"group 2 (layer 2) is left with no device: {victim} was its last"
    )


def test_neurons_of_a_poorly_received_device_move_within_its_group():
    method = {"allocation": "hybrid"}
    method["mapping"] = "random"
    planned = plan_scenario(six_devices(method))
    poor = planned.details.devices[2]
    links = [
        {"from": a, "to": b, "message_loss": "90%"}
        for other in planned.details.devices
        if other != poor
        for a, b in ((poor, other), (other, poor))
    ]
    network = {"link": {"rate": "20mbit", "delay": "2ms"}, "links": links}
    outcome = run_simulated(six_devices(method, network=network))
    last = {
        event.device: event.fields["neurons"]
        for event in outcome.events
        if event.event == "arrangement"
    }
    value = {
        each["rated_device"]: each["value"]
        for each in fields_of(outcome, "credibility")
    }
    assert value[poor] < 0.3
    assert 2 <= last[poor] < last[planned.details.devices[3]] / 3


def test_the_same_seed_loses_and_rearranges_the_same():
    one, same = (
        run_simulated(
            six_devices({"allocation": "random"}, network=LOSSY, workload={"steps": 20})
        )
        for _ in range(2)
    )
    assert fields_of(one, "step") == fields_of(same, "step")
    assert fields_of(one, "rearrangement") == fields_of(same, "rearrangement")


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        (
            "edgepipe",
            "worker1",
            "method 'edgepipe' does not support graceful shutdown: use kill",
        ),
        (
            "versatile",
            "worker4",
            "'worker4' is the coordinator of the run, which would then end",
        ),
    ],
)
def test_devices_that_cannot_retire_are_refused(name, device, message):
    scenario_file = six_devices(
        {"allocation": "hybrid"}, name, faults=[{"retire": device, "at": "1s"}]
    )
    assert (
        plan(problem_of(six_devices({"allocation": "hybrid"}))[0]).coordinator
        == "worker4"
    )
    with pytest.raises(InputError, match=message):
        prepare(trials(scenario_file)[0])


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            {"management_window": 3},
            "3 steps are too few: records take 7 steps to reach every device",
        ),
    ],
)
def test_impossible_plans_are_refused_with_their_key(method, message):
    with pytest.raises(InputError, match=message) as caught:
        plan_scenario(six_devices(method))
    assert caught.value.key == ("method", *method)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"micro_batches": 2}, "micro_batches"),
        (
            {"result_sharing": "link"},
            "result_sharing: invalid value 'link': choose one of layer, neuron, ideal",
        ),
        ({"thres_fw": "120%"}, "thres_fw: "),
        ({"credibility_threshold": "101%"}, "credibility_threshold: "),
        ({"alpha": "200%"}, "alpha: "),
        ({"grad_reuse_bw": -1}, "grad_reuse_bw: "),
    ],
)
def test_impossible_options_are_refused_with_their_key(method, message):
    with pytest.raises(InputError, match=message):
        prepare(trials(six_devices(method))[0])
