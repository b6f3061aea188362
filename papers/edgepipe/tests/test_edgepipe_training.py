"""Training with EdgePipe on the virtual clock, against delayed gradient descent on the undivided network."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from testbed.common.errors import InputError
from testbed.ml.data.batches import batch
from testbed.ml.slots.planner import timetable_of
from testbed.network.broadcast import is_received, received_part
from testbed.plan import PlanDetails
from testbed.scenario.expand import trials
from testbed.trace.metrics import metrics
from testbed.wire.cast import CastEncoding, size_around
from testbed.wire.message import Message
from testbed_edgepipe.method import EdgePipe
from testbed_edgepipe.planner import planned_assignment
from tests.helpers.delayed_gradients import DelayedReference
from tests.helpers.runs import (
    events_of,
    fields_of,
    make_scenario,
    problem_of,
    run_simulated,
    train_with_torch,
)

WORKLOAD = {"training": {"optimizer": {"learning_rate": 0.1}}}
STEPS = 12
# Slots from one step to the next in the pipeline of six_devices().
PERIOD = 4


def six_devices(method=(), model=None, **keys):
    workload = dict(WORKLOAD)
    if model is not None:
        workload["model"] = model
    return make_scenario(
        5, workload=workload, method={"name": "edgepipe", **dict(method)}, **keys
    )


def plan_scenario(scenario):
    problem, _ = problem_of(scenario)
    return problem, EdgePipe().plan(problem)


def plan_of(scenario):
    _, plan = plan_scenario(scenario)
    return plan


def compute_metrics(scenario, outcome):
    (trial,) = trials(scenario)
    return metrics(outcome, trial.experiment, plan_of(scenario), EdgePipe.declared)


def losses_of(outcome):
    return [step["loss"] for step in fields_of(outcome, "step")]


def times_of(outcome, kind, device):
    return [event.time for event in outcome.events if is_event(event, kind, device)]


def step_intervals(outcome):
    times = [event.time for event in outcome.events if event.event == "step"]
    return [later - earlier for earlier, later in pairwise(times)]


def loss_on_test_data(reference):
    """Return the loss of the newest weights of the reference on the test data."""
    images = torch.from_numpy(reference.data.test_images)
    labels = torch.from_numpy(reference.data.test_labels)
    logits = torch.func.functional_call(
        reference.model.eval(), reference.newest, (images,)
    )
    return float(functional.cross_entropy(logits, labels))


def train_reference(scenario):
    """Train the undivided network with the delays of equation (3)."""
    problem, plan = plan_scenario(scenario)
    table = timetable_of(plan.details)
    units = range(len(problem.model.units))
    spans = {unit: table.staleness(unit + 1) for unit in units}
    return DelayedReference(scenario).train(0, scenario.workload.steps, spans), spans


MLP = {"name": "mlp", "hidden": [12, 10, 8, 8]}
CNN = {"name": "cnn", "channels": [6, 7, 8], "hidden": [10, 8]}


@pytest.mark.parametrize(
    ("method", "model", "spans"),
    [
        ({}, MLP, [3, 2, 2, 1, 1]),
        ({"allocation": "vertical"}, MLP, [5, 4, 3, 2, 1]),
        ({"allocation": "horizontal"}, MLP, [1] * 5),
        ({"layers_per_group": 4}, MLP, [2, 1, 1, 1, 1]),
        ({"mapping": "random"}, MLP, [3, 2, 2, 1, 1]),
        ({"recovery": "r-tx"}, MLP, [3, 2, 2, 1, 1]),
        ({"pipelined": False}, MLP, [1] * 5),
        ({}, CNN, [3, 2, 2, 1, 1, 1]),
        ({"allocation": "vertical"}, CNN, [3, 3, 2, 2, 1, 1]),
        ({"allocation": "horizontal"}, CNN, [1] * 6),
        ({"pipelined": False}, CNN, [1] * 6),
    ],
)
def test_training_without_losses_equals_delayed_gradient_descent(method, model, spans):
    scenario = six_devices(method, model=model)
    expected, delays = train_reference(scenario)
    assert list(delays.values()) == spans
    outcome = run_simulated(scenario)
    steps = fields_of(outcome, "step")
    assert [step["step"] for step in steps] == list(range(12))
    assert [step["loss"] for step in steps] == pytest.approx(expected.losses, rel=1e-5)
    (evaluation,) = fields_of(outcome, "evaluate")
    assert evaluation["loss"] == pytest.approx(loss_on_test_data(expected), rel=1e-5)


def test_pipeline_refills_with_newest_weights_after_tests():
    scenario = six_devices({"evaluate_every": 5, "test_runs": 2})
    table = timetable_of(plan_of(scenario).details)
    expected, losses = DelayedReference(scenario), []
    spans = {unit: table.staleness(unit + 1) for unit in range(5)}
    for first, last in ((0, 5), (5, 10), (10, 12)):
        expected.train(first, last, spans)
        losses.append(loss_on_test_data(expected))
    outcome = run_simulated(scenario)
    assert losses_of(outcome) == pytest.approx(expected.losses, rel=1e-5)
    evaluations = fields_of(outcome, "evaluate")
    assert [evaluation["step"] for evaluation in evaluations] == [5, 10, 12]
    assert [evaluation["loss"] for evaluation in evaluations] == pytest.approx(
        losses, rel=1e-5
    )
    # Without message losses both test runs have the same accuracy.
    for evaluation in evaluations:
        assert evaluation["run_accuracies"] == [evaluation["accuracy"]] * 2


def test_step_period_and_run_length_match_theorem_1():
    scenario = six_devices()
    plan = plan_of(scenario)
    slot, table = plan.details.timeslot, timetable_of(plan.details)
    # Theorem 1: six layers pass forward and backward, and each later batch starts one period after the previous one.
    assert table.slot_count(12) == 2 * 6 + PERIOD * 11 - 1
    outcome = run_simulated(scenario)
    assert step_intervals(outcome) == pytest.approx([4 * slot] * 11)
    # 40 test samples are three batches of 16, whose forward passes start two slots isolated.
    last = max(event.time for event in outcome.events if event.event == "evaluate")
    assert last == pytest.approx((table.slot_count(12) + 6 + 2 * 2) * slot)
    assert plan.step_time == 4 * slot


def test_training_time_limits_number_of_steps():
    slot = plan_of(six_devices()).details.timeslot
    # The first step takes 11 slots and each later one 4, so five steps take 27 slots.
    for slots, steps in ((27.001, 5), (26.9, 4), (1000, STEPS)):
        microseconds = 1e6 * slots * slot
        outcome = run_simulated(six_devices({"training_time": f"{microseconds:f}us"}))
        assert len(fields_of(outcome, "step")) == steps


def test_single_device_trains_by_plain_gradient_descent_without_casts():
    scenario = make_scenario(0, workload=WORKLOAD, method={"name": "edgepipe"})
    table = timetable_of(plan_of(scenario).details)
    assert table.slot_count(12) == 11 * 12
    outcome = run_simulated(scenario)
    assert losses_of(outcome) == pytest.approx(train_with_torch(scenario)[1], rel=1e-5)
    assert fields_of(outcome, "cast") == []


GPIPE = {"allocation": "vertical", "micro_batches": 6}


def test_gpipe_equals_plain_gradient_descent_and_casts_each_micro_batch():
    # A batch of 16 samples makes six micro-batches of two or three samples.
    scenario = six_devices(GPIPE)
    plan = plan_of(scenario)
    table = timetable_of(plan.details)
    assert table.period == 2 * 6 + 2 * 6 - 3
    assert table.slot_count(12 * 6) == 12 * table.period
    outcome = run_simulated(scenario)
    assert losses_of(outcome) == pytest.approx(train_with_torch(scenario)[1], rel=1e-5)
    values = compute_metrics(scenario, outcome)
    (trial,) = trials(scenario)
    undivided = metrics(
        run_simulated(six_devices({"allocation": "vertical"})),
        trial.experiment,
        plan,
        EdgePipe.declared,
    )
    assert values["training_casts"] == 6 * undivided["training_casts"]
    assert values["update_share"] == 1


def test_gpipe_updates_with_received_micro_batches():
    network = {"link": {"message_loss": "10%"}}
    scenario = six_devices(GPIPE, network=network)
    outcome = run_simulated(scenario)
    backwards = backward_passes(outcome)
    assert 12 * 6 < len(backwards) < 12 * 6 * 5
    assert len(fields_of(outcome, "step")) == 12
    # Backward passes of the first five micro-batches accumulate gradients; the sixth one updates the weights.
    updates = sum(fields["batch"] % 6 == 5 for fields in backwards)
    values = compute_metrics(scenario, outcome)
    assert values["update_share"] == pytest.approx(updates / (12 * 5))
    # A layer that misses the gradient of its last micro-batch updates its weights with the earlier ones.
    assert updates / (12 * 5) > len(backwards) / (12 * 6 * 5)


def backward_passes(outcome):
    return [
        fields
        for fields in fields_of(outcome, "compute")
        if fields["span"] == "backward"
    ]


def test_unpipelined_batch_takes_one_slot_per_pass():
    plan = plan_of(six_devices({"pipelined": False}))
    assert timetable_of(plan.details).slot_count(12) == 11 * 12


def test_retransmission_increases_casts_and_receptions():
    network = {"link": {"message_loss": "50%"}}
    casts, learned = [], []
    for times in (1, 2, 6):
        method = {
            "recovery": "r-tx",
            "transmissions": times,
            "allocation": "vertical",
        }
        outcome = run_simulated(six_devices(method, network=network))
        casts.append(len(fields_of(outcome, "cast")))
        learned.append(len(backward_passes(outcome)))
    assert learned[0] < learned[1] < learned[2] <= 12 * 5
    # The output layer always casts its losses; a layer that misses losses casts none.
    assert casts[0] < casts[1] < casts[2]


def cast_kinds(outcome):
    return [fields["message"] for fields in fields_of(outcome, "cast")]


def value_events(outcome, kind):
    """Return the fields of casts or receptions, without acknowledgements."""
    return [
        fields for fields in fields_of(outcome, kind) if fields["message"] != "heard"
    ]


def test_acknowledged_casts_are_repeated_until_received():
    network = {"link": {"message_loss": "30%"}}
    acknowledged, lost = (
        run_simulated(six_devices({"recovery": name}, network=network))
        for name in ("ack", "none")
    )
    kinds = cast_kinds(acknowledged)
    value_casts = sum(kind != "heard" for kind in kinds)
    assert value_casts > 1.5 * len(cast_kinds(lost))
    # Each received cast is acknowledged once.
    assert kinds.count("heard") == len(value_events(acknowledged, "receive"))
    # A repeated cast addresses only the receivers that have not acknowledged it.
    peer_counts = [
        len(fields["peers"]) for fields in value_events(acknowledged, "cast")
    ]
    assert min(peer_counts) == 1
    losses = losses_of(run_simulated(six_devices()))
    assert losses_of(acknowledged) == pytest.approx(losses, rel=1e-5)
    values = compute_metrics(six_devices(), acknowledged)
    for name in ("update_share", "outputs_received", "losses_received"):
        assert values[name] == 1
    assert values["training_casts"] < len(kinds)


def test_unacknowledged_cast_ends_with_slot():
    devices = plan_of(six_devices({"mapping": "random"})).details.devices
    scenario = lossy({"recovery": "ack"}, (devices[2], devices[0]))
    plan = plan_of(scenario)
    outcome = run_simulated(scenario)
    assert step_intervals(outcome) == pytest.approx([4 * plan.details.timeslot] * 11)
    # Unacknowledged casts are repeated, so the device casts more than twice in each slot.
    assert len(times_of(outcome, "cast", devices[2])) > STEPS * PERIOD * 2


def test_metrics_count_receptions_of_training_and_tests_separately():
    scenario = six_devices({"test_runs": 2, "evaluate_every": 6})
    outcome = run_simulated(scenario)
    figures = compute_metrics(scenario, outcome)
    for values in ("outputs", "losses", "results"):
        assert figures[f"{values}_received"] == 1
    # For each batch, six devices cast the outputs of two layers and four of them cast the losses of two layers.
    assert figures["training_casts"] == 12 * (12 + 8)
    # Casts go to the other devices of the next layer: 16 transmissions of outputs and results, 12 of losses.
    assert figures["training_transmissions"] == 12 * 28
    assert figures["transmissions_rate"] / figures["casts_rate"] == pytest.approx(
        28 / 20
    )
    # Two evaluations have two test runs of three batches with twelve casts.
    assert figures["casts"] == 12 * (12 + 8) + 2 * 2 * 3 * 12
    starts = fields_of(outcome, "test_start")
    assert [start["step"] for start in starts] == [6, 12]


def test_coordinator_sends_arrangement_before_first_timeslot():
    scenario = six_devices({"send_model_partition": True})
    plan = plan_of(scenario)
    coordinator = plan.details.device_coordinator
    outcome, without = run_simulated(scenario), run_simulated(six_devices())
    assert losses_of(outcome) == losses_of(without)
    arrangements = sent_messages(outcome, "arrangement")
    requests = sent_messages(outcome, "needs_arrangement")
    receivers = {event.fields["peer"] for event in arrangements}
    assert receivers == {*plan.details.devices} - {coordinator}
    for event in arrangements:
        assert event.device == coordinator
        assert event.time < plan.details.start_time
    size = sum(event.fields["bytes"] for event in (*arrangements, *requests))
    values = compute_metrics(scenario, outcome)
    usual = compute_metrics(scenario, without)
    assert values["model_partition_bytes"] == size
    assert values["bytes_sent"] == size + usual["bytes_sent"]


def sent_messages(outcome, kind):
    return [
        event
        for event in outcome.events
        if event.event == "send" and event.fields["message"] == kind
    ]


def test_restarted_device_receives_arrangement_again():
    kill = {
        "kill": "worker1",
        "when": {"device": "worker1", "begins": "backward", "batch": 3},
        "for": "100ms",
    }
    outcome = run_simulated(six_devices({"send_model_partition": True}, faults=[kill]))
    assert outcome.status == "finished"
    arrangements = sent_messages(outcome, "arrangement")
    receivers = [event.fields["peer"] for event in arrangements]
    assert receivers.count("worker1") == 2


def test_large_test_batches_lengthen_test_timeslots():
    scenario = six_devices(
        {"test_batch_size": 40, "test_runs": 3, "timeslot_margin": "0s"}
    )
    plan = plan_of(scenario)
    assert plan.details.test_timeslot > plan.details.timeslot
    # All 40 test samples are one batch.
    (all_at_once,) = fields_of(run_simulated(scenario), "evaluate")
    (usual,) = fields_of(run_simulated(six_devices()), "evaluate")
    assert all_at_once["accuracy"] == usual["accuracy"]
    assert all_at_once["loss"] == pytest.approx(usual["loss"], rel=1e-5)


def test_test_runs_have_independent_message_losses():
    network = {"link": {"message_loss": "20%"}}
    workload = {"training": {"optimizer": {"learning_rate": 0.1}}, "steps": 60}
    method = {"name": "edgepipe", "test_runs": 20}
    scenario = make_scenario(5, workload=workload, method=method, network=network)
    outcome = run_simulated(scenario)
    (evaluation,) = fields_of(outcome, "evaluate")
    assert evaluation["deviation"] > 0
    figures = compute_metrics(scenario, outcome)
    assert figures["accuracy_deviation"] == evaluation["deviation"]
    assert figures["accuracy"] == evaluation["accuracy"]
    # Without message losses all test runs are equal.
    (thrice,) = fields_of(run_simulated(six_devices({"test_runs": 3})), "evaluate")
    (once,) = fields_of(run_simulated(six_devices()), "evaluate")
    assert thrice["deviation"] == once["deviation"] == 0
    assert thrice["accuracy"] == pytest.approx(once["accuracy"])
    assert thrice["loss"] == pytest.approx(once["loss"])


def lossy(method, *pairs, loss="99.9999999%", frame=None, **keys):
    links = [
        {"from": sender, "to": receiver, "message_loss": loss}
        for sender, receiver in pairs
    ]
    network = {
        "link": {"rate": "20mbit", "delay": "2ms"},
        "links": links,
        "frame": None if frame is None else f"{frame}B",
    }
    return six_devices({"mapping": "random", **method}, network=network, **keys)


@pytest.mark.parametrize("model", [MLP, CNN])
def test_device_that_misses_losses_stops_learning(model):
    # A device of layers 0 and 1 never receives the casts of the first device of layers 2 and 3.
    plan = plan_of(lossy({}, model=model))
    devices = plan.details.devices
    scenario = lossy({}, (devices[2], devices[0]), model=model)
    problem, plan = plan_scenario(scenario)
    assert plan.details.devices == devices
    assignment = planned_assignment(problem, plan)
    outcome = run_simulated(scenario)
    updates = dict.fromkeys(devices, 0)
    for event in outcome.events:
        if event.event == "compute" and is_backward(event):
            updates[event.device] += 1
    figures = compute_metrics(scenario, outcome)
    # Layer 0 is the input and has no weights; layer 1 never learns on the device that misses losses.
    expected = {}
    for name in devices:
        layers = sum(name in holders for holders in assignment.layers[1:])
        expected[name] = STEPS * layers
    share = 1 - STEPS / sum(expected.values())
    assert figures["update_share"] == pytest.approx(share)
    assert updates == {**expected, devices[0]: 0}
    assert losses_of(outcome) == pytest.approx(
        losses_with_frozen_neurons(scenario, assignment.neurons_of(devices[0], 1)),
        rel=1e-5,
    )


def is_event(event, kind, device):
    return event.event == kind and event.device == device


def losses_with_frozen_neurons(scenario, frozen):
    """Return the losses of training with frozen neurons of layer 1."""
    expected = DelayedReference(scenario)
    initial = {name: value.clone() for name, value in expected.newest.items()}
    history = [expected.newest]
    spans = train_reference(scenario)[1]
    rate = scenario.workload.training.optimizer.learning_rate
    for step in range(scenario.workload.steps):
        # Equation (3): the gradient of a unit uses the weights from before its span of steps.
        delayed = {}
        for name in expected.newest:
            unit = int(name.split(".")[0])
            version = max(0, step - spans[unit] + 1)
            delayed[name] = history[version][name]
        updated = {}
        for name, gradient in expected.gradients(step, delayed).items():
            updated[name] = history[-1][name] - rate * gradient
            if name.startswith("0."):
                rows = slice(frozen.start, frozen.stop)
                updated[name][rows] = initial[name][rows]
        history.append(updated)
    return expected.losses


@pytest.mark.parametrize(
    ("model", "frame"), [(MLP, None), (CNN, None), (MLP, 64), (CNN, 256)]
)
def test_lost_outputs_count_as_zeros_and_receive_no_gradient(model, frame):
    # A device of layers 2 and 3 loses all casts, or half of the frames, of a device of layers 0 and 1.
    method = {"pipelined": False}
    devices = plan_of(lossy(method, model=model)).details.devices
    loss = "99.9999999%" if frame is None else "50%"
    scenario = lossy(
        method, (devices[0], devices[2]), loss=loss, frame=frame, model=model
    )
    problem, plan = plan_scenario(scenario)
    assert plan.details.devices == devices
    assignment = planned_assignment(problem, plan)
    lost = assignment.neurons_of(devices[0], 1)
    receiving = assignment.neurons_of(devices[2], 2)
    # The receiver holds the first neurons of layer 2, so the others follow in the concatenation below.
    assert receiving.start == 0
    expected = DelayedReference(scenario)
    optimizer = torch.optim.SGD(
        expected.model.parameters(),
        lr=scenario.workload.training.optimizer.learning_rate,
    )
    losses, missed = [], []
    for step in range(scenario.workload.steps):
        chosen_samples = batch(len(expected.data.train_labels), 16, problem.seed, step)
        values = torch.from_numpy(expected.data.train_images[chosen_samples])
        for number, unit in enumerate(expected.model):
            outputs = unit(values)
            if number == 1:
                # The first device of layers 0 and 1 casts twice in each step.
                part = values[:, lost.start : lost.stop]
                gaps = missing_outputs(
                    part.detach(), step, devices, scenario, frame
                ).reshape(part.shape)
                part = part.masked_fill(gaps, 0.0)
                missed.append(float(gaps.float().mean()))
                received = [values[:, : lost.start], part, values[:, lost.stop :]]
                lossy_outputs = unit(torch.cat(received, dim=1))
                stop = receiving.stop
                outputs = torch.cat([lossy_outputs[:, :stop], outputs[:, stop:]], dim=1)
            values = outputs
        loss = functional.cross_entropy(
            values, torch.from_numpy(expected.data.train_labels[chosen_samples])
        )
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    outcome = run_simulated(scenario)
    assert losses_of(outcome) == pytest.approx(losses, rel=1e-5)
    (counted,) = [
        fields
        for name, fields in events_of(outcome, "parts_received")
        if name == devices[2] and fields["purpose"] == "forward"
    ]
    assert counted["expected"] - counted["received"] == pytest.approx(
        sum(missed), rel=1e-4
    )
    layers = len(assignment.groups[assignment.group_of(devices[2])])
    assert counted["expected"] == STEPS * (2 + layers - 1)


def missing_outputs(values, step, devices, scenario, frame):
    """Return a mask of missing outputs at the receiver, (samples, values)."""
    values = values.flatten(1)
    if frame is None:
        return torch.ones(values.shape, dtype=torch.bool)
    message = Message("outputs", {"batch": step, "layer": 1}, {"tensor": values})
    header = len(CastEncoding(devices[0], devices).header(message, devices[2:4]))
    chance = partial(
        is_received, scenario.seed, devices[0], devices[2], 2 * step + 1, 0.5
    )
    received = received_part(message, header, frame, chance)
    if received is None:
        return torch.ones(values.shape, dtype=torch.bool)
    return received.missing["tensor"]


def test_repeated_cast_fills_missing_frames():
    network = {
        "link": {"rate": "20mbit", "delay": "2ms", "message_loss": "20%"},
        "frame": "64B",
    }
    metrics_by_recovery = {}
    for recovery in ("none", "r-tx", "ack"):
        scenario = six_devices({"recovery": recovery}, network=network)
        outcome = run_simulated(scenario)
        metrics_by_recovery[recovery] = metrics_with_stored_plan(scenario, outcome)
    none, repeated, acknowledged = metrics_by_recovery.values()
    assert 0.6 < none["outputs_received"] < 0.8
    assert 0.8 < repeated["outputs_received"] < 0.96
    assert acknowledged["outputs_received"] > 0.96
    assert none["update_share"] < 0.3 < acknowledged["update_share"]


def metrics_with_stored_plan(scenario, outcome):
    """Compute metrics with a plan read from storage, whose details are plain values."""
    (trial,) = trials(scenario)
    plan = plan_of(scenario)
    details = PlanDetails.model_validate(plan.details.model_dump(mode="json"))
    stored = plan.model_copy(update={"details": details})
    return metrics(outcome, trial.experiment, stored, EdgePipe.declared)


@pytest.mark.parametrize("method", [{}, {"evaluate_every": 5, "test_runs": 2}])
def test_metrics_distinguish_training_from_tests(method):
    scenario = six_devices(method)
    outcome = run_simulated(scenario)
    values = metrics_with_stored_plan(scenario, outcome)
    # Each layer has two devices: outputs of five layers and the results are cast forward, losses of four layers back.
    assert values["training_casts"] == 12 * (2 * 6 + 2 * 4)
    assert "time_to_80" not in values
    if not method:
        details = plan_of(scenario).details
        slots = timetable_of(details).slot_count(STEPS)
        assert values["timeslots"] == slots
        # The rate is per device and second, from the start of the first slot to the start of the last one.
        rate = STEPS * 28 / (slots - 1) / details.timeslot / 6
        assert values["transmissions_rate"] == pytest.approx(rate, rel=1e-3)


def test_mean_accuracy_covers_all_evaluations():
    scenario = six_devices({"evaluate_every": 5, "test_runs": 2})
    outcome = run_simulated(scenario)
    evaluations = fields_of(outcome, "evaluate")
    accuracies = [evaluation["accuracy"] for evaluation in evaluations]
    assert len(accuracies) == 3
    values = metrics_with_stored_plan(scenario, outcome)
    assert values["accuracy_mean"] == pytest.approx(sum(accuracies) / 3)


def test_time_to_80_percent_excludes_tests():
    model = {"name": "mlp", "hidden": [32]}
    workload = {
        "model": model,
        "training": {"optimizer": {"learning_rate": 0.3}},
        "steps": 60,
        "batch_size": 32,
    }
    method = {"name": "edgepipe", "allocation": "horizontal", "evaluate_every": 10}
    scenario = make_scenario(5, workload=workload, method=method)
    outcome = run_simulated(scenario)
    steps = [
        evaluation["step"]
        for evaluation in fields_of(outcome, "evaluate")
        if evaluation["accuracy"] >= 0.8
    ]
    assert steps
    # A network of three layers takes five slots for a step without a pipeline.
    slots = steps[0] * 5
    assert metrics_with_stored_plan(scenario, outcome)["time_to_80"] == pytest.approx(
        slots * plan_of(scenario).details.timeslot
    )


def test_equal_seeds_lose_equal_casts():
    network = {
        "link": {"rate": "20mbit", "delay": "2ms"},
        "radio": {"area": [50, 50], "packets": 50},
    }
    first, second = (
        fields_of(run_simulated(six_devices(network=network)), "step") for _ in range(2)
    )
    assert first == second
    assert first != fields_of(run_simulated(six_devices()), "step")


def test_partitioned_device_is_missing_until_partition_heals():
    # The partitioned device is one of two with layers 2 and 3; without its losses layer 1 cannot learn.
    plan = plan_of(six_devices())
    isolated, before = plan.details.devices[2], plan.details.devices[0]
    slot = plan.details.timeslot
    outcome = run_simulated(
        six_devices(faults=[{"partition": [[isolated]], "at": "1.5s", "for": "1.2s"}])
    )
    assert step_intervals(outcome) == pytest.approx([4 * slot] * 11)
    backward_times = [
        event.time
        for event in outcome.events
        if is_event(event, "compute", before) and is_backward(event)
    ]
    # The device may still use losses that it received in the slot before the partition.
    assert not [time for time in backward_times if 1.5 + slot < time < 2.7]
    assert min(backward_times) < 1.5
    assert max(backward_times) > 2.7
    # The partitioned device continues to compute and cast, but no device receives its casts.
    receive_times = [
        event.time
        for event in outcome.events
        if event.event == "receive" and event.fields["peer"] == isolated
    ]
    assert [time for time in times_of(outcome, "cast", isolated) if 1.5 < time < 2.7]
    assert not [time for time in receive_times if 1.5 + slot < time < 2.7]
    assert max(receive_times) > 2.7


def is_backward(event):
    return event.fields["span"] == "backward"


def test_training_continues_while_device_is_off_and_after_restart():
    scenario = six_devices()
    plan = plan_of(scenario)
    victim = plan.details.devices[0]
    faults = [{"kill": victim, "at": "0.5s", "for": "0.5s"}]
    outcome = run_simulated(six_devices(faults=faults))
    slot = plan.details.timeslot
    assert step_intervals(outcome) == pytest.approx([4 * slot] * 11)
    assert len(fields_of(outcome, "evaluate")) == 1
    begin_times = times_of(outcome, "begin", victim)
    assert not [time for time in begin_times if 0.5 < time < 1]
    assert min(begin_times) < 0.5
    assert max(begin_times) > 1


@pytest.mark.parametrize(
    ("keys", "key", "message"),
    [
        (
            {"workload": {"model": {"name": "resnet18"}}},
            ("model", "name"),
            "of resnet18 must be a convolution, a pool or",
        ),
        (
            {"method": {"timeslot": "1us"}},
            ("method", "timeslot"),
            "is too short: computing takes up to",
        ),
        (
            {"method": {"training_time": "1ms"}},
            ("method", "training_time"),
            "is too short: one step takes",
        ),
        (
            {"method": {"layers_per_group": 1}, "workers": 3},
            ("method", "layers_per_group"),
            "makes 6 groups of layers for 4 devices",
        ),
        (
            {"method": {"mapping": "upper"}, "workers": 9},
            ("method", "mapping"),
            "10 devices are too many",
        ),
        (
            {"network": {"topology": "star"}},
            ("network", "topology"),
            "no link leads from",
        ),
        (
            {"network": {"link": {"message_loss": "100%"}}},
            ("network",),
            "but receives none",
        ),
        (
            {"method": {"micro_batches": 2}},
            ("method", "micro_batches"),
            "is GPipe, which needs groups of one layer",
        ),
        (
            {"method": {**GPIPE, "micro_batches": 17}},
            ("method", "micro_batches"),
            "too many for a batch of 16 samples",
        ),
        (
            {
                "workload": {"model": {"name": "mlp", "hidden": [4]}},
                "method": {"allocation": "horizontal"},
            },
            ("method", "allocation"),
            "layer 1 has 4 neurons for 6 devices",
        ),
    ],
)
def test_impossible_plan_is_rejected_with_key(keys, key, message):
    keys = dict(keys)
    workload = {**WORKLOAD, **keys.pop("workload", {})}
    method = {"name": "edgepipe", **keys.pop("method", {})}
    problem, _ = problem_of(
        make_scenario(keys.pop("workers", 5), workload=workload, method=method, **keys)
    )
    with pytest.raises(InputError, match=message) as caught:
        EdgePipe().plan(problem)
    assert caught.value.key == key


def test_acknowledgements_need_return_path():
    # A device that holds only the input layer receives nothing but acknowledgements.
    method = {"allocation": "vertical", "mapping": "random"}
    first = plan_of(six_devices(method)).details.devices[0]
    devices = ["source", *(f"worker{number}" for number in range(1, 6))]
    devices.remove(first)
    links = [{"from": name, "to": first, "message_loss": "100%"} for name in devices]
    network = {"links": links}
    assert plan_scenario(six_devices(method, network=network))
    with pytest.raises(InputError, match="ack needs acknowledgements") as caught:
        plan_scenario(six_devices({**method, "recovery": "ack"}, network=network))
    assert caught.value.key == ("method", "recovery")


def test_acknowledgement_timeout_covers_slowest_link():
    slow = {"from": "worker2", "to": "worker3", "rate": "10kbit"}
    network = {"link": {"rate": "20mbit"}, "links": [slow]}
    problem, plan = plan_scenario(six_devices({"recovery": "ack"}, network=network))
    # A device knows only its own links, so the timeouts come with the plan.
    known_problem, known_plan = EdgePipe().facts(problem, plan, "worker1")
    assert ("worker2", "worker3") not in known_problem.links
    details = known_plan.details
    timeouts = dict(zip(details.devices, details.acknowledgement_seconds, strict=True))
    # A cast of worker2 is sent at the rate of its slowest link, whichever device receives it.
    assert timeouts["worker1"] > 8 * size_around(0) / 10e3


def test_missing_outputs_are_masked_by_default():
    hybrid = {"allocation": "hybrid"}
    network = {"link": {"rate": "20mbit", "delay": "2ms", "message_loss": "30%"}}
    default, masked, unmasked = (
        losses_of(run_simulated(six_devices({**hybrid, **mask}, network=network)))
        for mask in (
            {},
            {"mask_missing_outputs": True},
            {"mask_missing_outputs": False},
        )
    )
    assert default == masked
    # The mask changes gradients, so the loss of the first step is equal.
    assert default[0] == unmasked[0]
    assert default != unmasked
