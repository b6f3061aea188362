"""Training with VersatileFL on the virtual clock, with and without message losses and device failures."""

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
from tests.helpers.runs import (
    events_of,
    fields_of,
    make_scenario,
    problem_of,
    run_simulated,
)

# Neurons of the input and of the layers of the default model.
NEURONS = 64 + 12 + 10 + 8 + 8 + 10
# Timeslots of a step: eleven passes without a pipeline (horizontal), a period of four with one (hybrid).
HORIZONTAL_SLOTS = 11
HYBRID_SLOTS = 4
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


def first_worker(plan_of_run):
    workers = [
        name for name in plan_of_run.details.devices if name != plan_of_run.coordinator
    ]
    return workers[0]


def losses_of(outcome, event="step"):
    return [fields["loss"] for fields in fields_of(outcome, event)]


def causes_of(outcome):
    return {fields["cause"] for fields in fields_of(outcome, "rearrangement")}


def final_neurons(outcome):
    """Return the number of neurons on each device at the end."""
    neurons = {}
    for device, fields in events_of(outcome, "arrangement"):
        neurons[device] = fields["neurons"]
    return neurons


def states_of(outcome, victim):
    return [
        fields["state"]
        for device, fields in events_of(outcome, "state")
        if device == victim
    ]


def begin_times_of(outcome, device):
    return [
        event.time
        for event in outcome.events
        if (event.event, event.device) == ("begin", device)
    ]


def links_in_both_directions(device, others):
    links = []
    for other in others:
        links.append((device, other))
        links.append((other, device))
    return links


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
        losses = losses_of(versatile, event)
        assert losses == pytest.approx(losses_of(edgepipe, event), rel=1e-5)


@pytest.mark.parametrize("model", [{}, CNN])
def test_random_allocation_has_losses_of_horizontal_allocation(model):
    short = {"steps": 12, **model}
    scattered, contiguous = (
        run_simulated(six_devices({"allocation": allocation}, workload=short))
        for allocation in ("random", "horizontal")
    )
    assert losses_of(scattered) == pytest.approx(losses_of(contiguous), rel=1e-5)


def count_maintenance(outcome):
    """Sum the counters of maintenance events over devices and layers."""
    counts = Counter()
    for fields in fields_of(outcome, "maintenance"):
        for name, value in fields.items():
            if name not in ("layer", "step", "version"):
                counts[name] += value
    return counts


def test_kinds_of_maintenance_can_be_disabled_separately():
    kinds = ("substitution", "reuse_gradients", "rearrangement")
    counts_by_kind = {}
    for enabled in (*kinds, None):
        switches = {kind: kind == enabled for kind in kinds}
        outcome = run_simulated(
            six_devices({"allocation": "horizontal", **switches}, network=LOSSY)
        )
        counts_by_kind[enabled] = count_maintenance(outcome)
        assert bool(fields_of(outcome, "rearrangement")) == (enabled == "rearrangement")
    with_substitution = counts_by_kind["substitution"]
    with_reuse = counts_by_kind["reuse_gradients"]
    unmaintained = counts_by_kind[None]
    assert with_substitution["dropped"] == 0
    assert with_substitution["fresh"] > 10 * unmaintained["fresh"]
    assert unmaintained["dropped"] > 0
    assert with_substitution["reused"] == 0
    assert counts_by_kind["rearrangement"]["reused"] == 0
    # Without a new gradient there is none to save and reuse.
    assert with_reuse["fresh"] > 0 or with_reuse["reused"] == 0


def test_metrics_report_losses_by_layer_and_neurons_by_device():
    scenario_file = six_devices(
        {"allocation": "horizontal", "management_window": 12, "thres_fw": "60%"},
        network=LOSSY,
        workload={"steps": 20},
    )
    (trial,) = trials(scenario_file)
    outcome = run_simulated(scenario_file)
    values = metrics(outcome, trial.experiment, plan_scenario(scenario_file), DECLARED)
    sums = {}
    for fields in fields_of(outcome, "maintenance"):
        sums.setdefault(str(fields["layer"]), Counter()).update(fields)
    layers, devices = values["layers"], values["devices"]
    assert layers.keys() == sums.keys() == {"1", "2", "3", "4", "5"}
    for layer, counts in sums.items():
        substituted = counts["missing"] / counts["expected"]
        dropped = counts["dropped"] / counts["batches"]
        assert layers[layer]["substituted_inputs"] == substituted
        assert layers[layer]["dropped_batches"] == dropped
    # The share of reused gradients in all layers is weighted by the updates of each layer.
    updates = [
        counts["fresh"] + counts["reused"] + counts["idle"] for counts in sums.values()
    ]
    reused = [layer["gradients_reused"] for layer in layers.values()]
    assert sum(map(operator.mul, updates, reused)) / sum(updates) == pytest.approx(
        values["gradients_reused"]
    )
    neurons = [
        devices[name]["neurons"]
        for name in plan_scenario(scenario_file).details.devices
    ]
    assert sum(neurons) == NEURONS
    lowest = min(row.get("credibility", 1) for row in devices.values())
    assert lowest == values["lowest_credibility"]
    assert devices["source"].keys() >= {"compute", "neurons"}


def test_neurons_of_killed_device_are_reset_on_other_devices():
    scenario_file = six_devices({"allocation": "horizontal"})
    plan_of_run = plan_scenario(scenario_file)
    victim = first_worker(plan_of_run)
    at = 5 * HORIZONTAL_SLOTS * plan_of_run.details.timeslot
    outcome = run_simulated(
        six_devices(
            {"allocation": "horizontal"}, faults=[{"kill": victim, "at": f"{at}s"}]
        )
    )
    assert outcome.status == "finished"
    # Casts of the victim were received in the first five steps of the window and not at its end.
    change = fields_of(outcome, "rearrangement")[0]
    assert (change["cause"], change["devices"]) == ("failure", [victim])
    assert change["version"] == 1
    assert change["reset"] > 0
    neurons = final_neurons(outcome)
    neurons.pop(victim)
    assert sum(neurons.values()) == NEURONS
    losses = losses_of(outcome)
    assert sum(losses[-10:]) < sum(losses[:10])


def test_maintenance_stops_after_naive_after():
    method = {
        "allocation": "hybrid",
        "naive_after": 15,
        "naive_baseline": "naive-zeros",
    }
    plan_of_run = plan_scenario(six_devices(method))
    victim = first_worker(plan_of_run)
    step = HYBRID_SLOTS * plan_of_run.details.timeslot
    faults = [{"kill": victim, "at": f"{15 * step}s"}]
    network = {"link": {"rate": "20mbit", "delay": "2ms", "message_loss": "5%"}}
    keys = {"faults": faults, "network": network, "workload": {"steps": 60}}
    naive, maintained = (
        run_simulated(six_devices({**method, "naive_after": steps}, **keys))
        for steps in (15, None)
    )
    assert losses_of(naive)[:15] == losses_of(maintained)[:15]
    assert "failure" in causes_of(maintained)
    assert "failure" not in causes_of(naive)
    reused = [
        fields["reused"]
        for fields in fields_of(naive, "maintenance")
        if "reused" in fields and fields["step"] > 36
    ]
    assert not reused, "saved gradients are not used after naive_after"
    naive_dropped, blocked = (
        run_simulated(six_devices({**method, "naive_baseline": baseline}, **keys))
        for baseline in ("naive", "naive-blocked")
    )
    for outcome, learns in ((naive, True), (naive_dropped, False), (blocked, False)):
        fresh = [
            fields.get("fresh", 0)
            for fields in fields_of(outcome, "maintenance")
            if fields["step"] > 36
        ]
        assert any(fresh) == learns, (
            "training is blocked by a batch that no device received completely"
        )


def test_retiring_device_hands_over_neurons_and_rejoins_with_even_share():
    method = {"allocation": "horizontal"}
    plan_of_run = plan_scenario(six_devices(method))
    victim = first_worker(plan_of_run)
    step = HORIZONTAL_SLOTS * plan_of_run.details.timeslot
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
    assert states_of(outcome, victim)[:5] == [
        "up",
        "started",
        "finished",
        "up",
        "started",
    ]
    neurons = [
        event.fields["neurons"]
        for event in outcome.events
        if (event.event, event.device) == ("arrangement", victim)
    ]
    assert neurons[1] == 0
    # Shares are rounded in each of the six layers.
    assert neurons[-1] == pytest.approx(neurons[0], abs=6)
    # No neuron is reset: training continues like the undisturbed run, except for a batch in flight.
    undisturbed = losses_of(run_simulated(six_devices(method)))
    losses = losses_of(outcome)
    assert losses[:5] == pytest.approx(undisturbed[:5], rel=1e-5)
    assert losses[-1] == pytest.approx(undisturbed[-1], rel=0.05)


def test_retiring_device_ends_with_run_despite_dead_receiver():
    # With gathered results and final weights the coordinator's program continues after the last slot.
    method = {"allocation": "horizontal", "test_results": "gathered"}
    plan_of_run = plan_scenario(six_devices(method))
    coordinator = plan_of_run.coordinator
    leaving, dying = [
        name for name in plan_of_run.details.devices if name != coordinator
    ][:2]
    step = HORIZONTAL_SLOTS * plan_of_run.details.timeslot
    faults = [
        # Both faults are in one slot, so the other devices do not know yet that the receiver is dead.
        {"kill": dying, "at": f"{20.01 * step}s"},
        {"retire": leaving, "at": f"{20.01 * step}s"},
    ]
    outcome = run_simulated(six_devices(method, faults=faults))
    assert outcome.error is None
    assert states_of(outcome, leaving) == ["up", "started", "finished"]


@pytest.mark.parametrize("scored", ["cast", "gathered"])
def test_killed_device_rejoins_after_restart(scored):
    method = {"allocation": "hybrid", "test_results": scored}
    plan_of_run = plan_scenario(six_devices(method))
    victim = first_worker(plan_of_run)
    step = HYBRID_SLOTS * plan_of_run.details.timeslot
    faults = [
        {"kill": victim, "at": f"{10 * step}s"},
        {"restart": victim, "at": f"{12 * step}s"},
    ]
    outcome = run_simulated(six_devices(method, faults=faults, workload={"steps": 40}))
    assert outcome.error is None
    changes = fields_of(outcome, "rearrangement")
    assert (changes[0]["cause"], changes[0]["devices"]) == ("join", [victim])
    assert max(begin_times_of(outcome, victim)) > 13 * step


def test_restarted_coordinator_leaves_decisions_to_acting_coordinator():
    method = {"allocation": "horizontal"}
    plan_of_run = plan_scenario(six_devices(method))
    step = HORIZONTAL_SLOTS * plan_of_run.details.timeslot
    faults = [
        {"kill": plan_of_run.coordinator, "at": f"{11.6 * step}s"},
        {"restart": plan_of_run.coordinator, "at": f"{30.5 * step}s"},
    ]
    outcome = run_simulated(six_devices(method, faults=faults, workload={"steps": 42}))
    assert outcome.error is None
    changes = fields_of(outcome, "rearrangement")
    assert ("join", [plan_of_run.coordinator]) in [
        (fields["cause"], fields["devices"]) for fields in changes
    ]
    versions = [fields["version"] for fields in changes]
    assert versions == sorted(set(versions))


def test_joining_device_is_not_rated_in_first_window():
    method = {"allocation": "hybrid"}
    plan_of_run = plan_scenario(six_devices(method))
    victim = plan_of_run.details.devices[0]
    step = HYBRID_SLOTS * plan_of_run.details.timeslot
    # The device joins in the window from step 36 to 48, before records of the previous window have arrived.
    faults = [
        {"kill": victim, "at": f"{11.6 * step}s"},
        {"join": victim, "at": f"{33 * step}s"},
    ]
    outcome = run_simulated(six_devices(method, faults=faults, workload={"steps": 70}))
    (join_time,) = [
        event.time
        for event in outcome.events
        if event.event == "rearrangement" and event.fields["cause"] == "join"
    ]
    assert 36 < join_time / step < 36 + plan_of_run.details.record_delay
    windows = {}
    for fields in fields_of(outcome, "credibility"):
        windows.setdefault(fields["window"], set()).add(fields["rated_device"])
    assert [victim in windows[window] for window in (2, 3, 4)] == [False, False, True]


def test_silent_device_rejoins_after_links_recover():
    method = {"allocation": "hybrid"}
    plan_of_run = plan_scenario(six_devices(method))
    victim = plan_of_run.details.devices[2]
    window = 12 * HYBRID_SLOTS * plan_of_run.details.timeslot
    others = [name for name in plan_of_run.details.devices if name != victim]
    faults = []
    for loss, at in (("100%", 0.5 * window), ("0%", 4.25 * window)):
        for sender, receiver in links_in_both_directions(victim, others):
            change = {"from": sender, "to": receiver, "message_loss": loss}
            faults.append({"degrade": change, "at": f"{at}s"})
    outcome = run_simulated(six_devices(method, faults=faults, workload={"steps": 84}))
    assert outcome.error is None
    changes = [
        (event.time, event.fields)
        for event in outcome.events
        if event.event == "rearrangement"
    ]
    (failure_time, failure), (join_time, join) = [
        (at, fields) for at, fields in changes if fields["cause"] in ("failure", "join")
    ]
    assert (failure["devices"], join["devices"]) == ([victim], [victim])
    # The silent device is alive, so it still hands over the weights of its reset neurons within two slots.
    moves = [
        event.time
        for event in outcome.events
        if event.event == "receive" and event.fields["message"] == "moved"
    ]
    assert failure["reset"] > 0
    assert [
        at
        for at in moves
        if failure_time < at < failure_time + 2 * plan_of_run.details.timeslot
    ]
    # The device is excluded while its casts are lost and rejoins in the window after its links recover.
    assert failure_time < 4.25 * window < join_time < 5.75 * window
    assert join["reset"] == 0
    assert final_neurons(outcome)[victim] > 2
    begin_times = begin_times_of(outcome, victim)
    assert not [
        at for at in begin_times if failure_time + 0.5 * window < at < join_time
    ]
    assert max(begin_times) > join_time


@pytest.mark.parametrize("when", [{"at": "0.1s"}, {"when": {"event": "test_start"}}])
def test_device_without_receptions_declares_no_failures(when):
    # Test runs cast no losses, so the receptions before the test are the last ones of a window.
    method = {"allocation": "hybrid", "evaluate_every": 12, "test_runs": 10}
    plan_of_run = plan_scenario(six_devices(method))
    victim = plan_of_run.details.devices[2]
    others = [name for name in plan_of_run.details.devices if name != victim]
    if "when" in when:
        when = {"when": {"device": plan_of_run.coordinator, **when["when"]}}
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
    assert "failure" not in causes_of(outcome)


def test_group_without_devices_fails_run():
    method = {"allocation": "vertical", "management_window": 20}
    victim = plan_scenario(six_devices(method)).details.devices[2]
    faults = [{"kill": victim, "at": "0.1s"}]
    outcome = run_simulated(six_devices(method, faults=faults, workload={"steps": 80}))
    assert outcome.status == "failed"
    assert outcome.error.endswith(
        f"group 2 (layer 2) is left with no device: {victim} was its last"
    )


def test_poorly_received_device_loses_neurons_to_group():
    method = {"allocation": "hybrid", "mapping": "random"}
    plan_of_run = plan_scenario(six_devices(method))
    lossy_device = plan_of_run.details.devices[2]
    others = [name for name in plan_of_run.details.devices if name != lossy_device]
    links = [
        {"from": sender, "to": receiver, "message_loss": "90%"}
        for sender, receiver in links_in_both_directions(lossy_device, others)
    ]
    network = {"link": {"rate": "20mbit", "delay": "2ms"}, "links": links}
    outcome = run_simulated(six_devices(method, network=network))
    credibility = {
        fields["rated_device"]: fields["value"]
        for fields in fields_of(outcome, "credibility")
    }
    assert credibility[lossy_device] < 0.3
    neurons = final_neurons(outcome)
    # The device keeps at least one neuron in each of its two layers.
    assert 2 <= neurons[lossy_device] < neurons[plan_of_run.details.devices[3]] / 3


def test_equal_seeds_have_equal_steps_and_rearrangements():
    first, second = (
        run_simulated(
            six_devices({"allocation": "random"}, network=LOSSY, workload={"steps": 20})
        )
        for _ in range(2)
    )
    assert fields_of(first, "step") == fields_of(second, "step")
    assert fields_of(first, "rearrangement") == fields_of(second, "rearrangement")


@pytest.mark.parametrize(
    ("method", "device", "message"),
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
def test_impossible_retirement_is_rejected(method, device, message):
    scenario_file = six_devices(
        {"allocation": "hybrid"}, method, faults=[{"retire": device, "at": "1s"}]
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
def test_impossible_plan_is_rejected_with_key(method, message):
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
def test_invalid_option_is_rejected_with_key(method, message):
    with pytest.raises(InputError, match=message):
        prepare(trials(six_devices(method))[0])
