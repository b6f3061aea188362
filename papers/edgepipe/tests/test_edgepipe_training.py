"""EdgePipe on the virtual clock, beside delayed gradient descent on the undivided network."""

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
from testbed.wire.cast import CastForm, size_around
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

SIX = {"workers": 5, "workload": {"training": {"optimizer": {"learning_rate": 0.1}}}}


def six_devices(method=(), model=None, **keys):
    workload = SIX["workload"] | ({} if model is None else {"model": model})
    return make_scenario(
        5, workload=workload, method={"name": "edgepipe", **dict(method)}, **keys
    )


def plan_scenario(scenario):
    problem, _ = problem_of(scenario)
    return problem, EdgePipe().plan(problem)


def train_reference(scenario):
    """Train the undivided network with the delay that equation (3) gives each layer."""
    problem, chosen = plan_scenario(scenario)
    table = timetable_of(chosen.details)
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
def test_without_losses_it_is_delayed_gradient_descent_on_the_undivided_network(
    method, model, spans
):
    written = six_devices(method, model=model)
    expected, delays = train_reference(written)
    assert list(delays.values()) == spans
    outcome = run_simulated(written)
    steps = fields_of(outcome, "step")
    assert [step["step"] for step in steps] == list(range(12))
    assert [step["loss"] for step in steps] == pytest.approx(expected.losses, rel=1e-5)
    data = expected.data
    logits = torch.func.functional_call(
        expected.model.eval(), expected.newest, (torch.from_numpy(data.test_images),)
    )
    loss = functional.cross_entropy(logits, torch.from_numpy(data.test_labels))
    (tested,) = fields_of(outcome, "evaluate")
    assert tested["loss"] == pytest.approx(float(loss), rel=1e-5)


def test_a_pipeline_that_drains_for_tests_fills_again_with_the_newest_weights():
    written = six_devices({"evaluate_every": 5, "test_runs": 2})
    table = timetable_of(plan_scenario(written)[1].details)
    expected, losses = DelayedReference(written), []
    spans = {unit: table.staleness(unit + 1) for unit in range(5)}
    data = expected.data
    images, labels = (
        torch.from_numpy(data.test_images),
        torch.from_numpy(data.test_labels),
    )
    for first, last in ((0, 5), (5, 10), (10, 12)):
        expected.train(first, last, spans)
        logits = torch.func.functional_call(
            expected.model.eval(), expected.newest, (images,)
        )
        losses.append(float(functional.cross_entropy(logits, labels)))
    outcome = run_simulated(written)
    assert [step["loss"] for step in fields_of(outcome, "step")] == pytest.approx(
        expected.losses, rel=1e-5
    )
    tested = fields_of(outcome, "evaluate")
    assert [each["step"] for each in tested] == [5, 10, 12]
    assert [each["loss"] for each in tested] == pytest.approx(losses, rel=1e-5)
    assert [each["run_accuracies"] for each in tested] == [
        [each["accuracy"]] * 2 for each in tested
    ]


def test_steps_come_once_a_period_and_the_run_lasts_as_many_slots_as_theorem_1_says():
    written = six_devices()
    _, chosen = plan_scenario(written)
    slot, table = chosen.details.timeslot, timetable_of(chosen.details)
    assert table.slot_count(12) == 2 * 6 + 2 * 2 * 11 - 1
    outcome = run_simulated(written)
    ends = [event.time for event in outcome.events if event.event == "step"]
    assert [later - earlier for earlier, later in pairwise(ends)] == pytest.approx(
        [4 * slot] * 11
    )
    # 40 test samples are three batches; forward alone, two slots apart.
    last = max(event.time for event in outcome.events if event.event == "evaluate")
    assert last == pytest.approx((table.slot_count(12) + 6 + 2 * 2) * slot)
    assert chosen.step_time == 4 * slot


def test_as_many_steps_are_trained_as_fit_into_the_time():
    slot = plan_scenario(six_devices())[1].details.timeslot
    for time, steps in (
        (27.001 * slot, 5),
        (26.9 * slot, 4),
        (1000 * slot, 12),
    ):  # 11 slots and 4 for each but the first
        assert (
            len(
                fields_of(
                    run_simulated(six_devices({"training_time": f"{1e6 * time:f}us"})),
                    "step",
                )
            )
            == steps
        )


def test_one_device_in_slots_is_the_papers_naive_and_plain_gradient_descent():
    written = make_scenario(0, workload=SIX["workload"], method={"name": "edgepipe"})
    table = timetable_of(plan_scenario(written)[1].details)
    assert table.slot_count(12) == 11 * 12
    outcome = run_simulated(written)
    assert [step["loss"] for step in fields_of(outcome, "step")] == pytest.approx(
        train_with_torch(written)[1], rel=1e-5
    )
    assert fields_of(outcome, "cast") == []


GPIPE = {"allocation": "vertical", "micro_batches": 6}


def test_gpipe_is_plain_gradient_descent_and_casts_each_micro_batch():
    # 16 samples in six parts of two or three.
    written = six_devices(GPIPE)
    _, chosen = plan_scenario(written)
    table = timetable_of(chosen.details)
    assert table.period == 2 * 6 + 2 * 6 - 3
    assert table.slot_count(12 * 6) == 12 * table.period
    outcome = run_simulated(written)
    assert [step["loss"] for step in fields_of(outcome, "step")] == pytest.approx(
        train_with_torch(written)[1], rel=1e-5
    )
    (trial,) = trials(written)
    whole = run_simulated(six_devices({"allocation": "vertical"}))
    cut, one = (
        metrics(each, trial.experiment, chosen, EdgePipe.declared)["training_casts"]
        for each in (outcome, whole)
    )
    assert cut == 6 * one
    assert (
        metrics(outcome, trial.experiment, chosen, EdgePipe.declared)["update_share"]
        == 1
    )


def test_gpipe_updates_with_the_micro_batches_that_came():
    network = {"link": {"message_loss": "10%"}}
    written = six_devices(GPIPE, network=network)
    outcome = run_simulated(written)
    backwards = [
        each for each in fields_of(outcome, "compute") if each["span"] == "backward"
    ]
    assert 12 * 6 < len(backwards) < 12 * 6 * 5
    assert len(fields_of(outcome, "step")) == 12
    # Backwards of the first five micro-batches add up gradients, and the sixth updates the weights.
    updates = sum(each["batch"] % 6 == 5 for each in backwards)
    (trial,) = trials(written)
    _, chosen = plan_scenario(written)
    values = metrics(outcome, trial.experiment, chosen, EdgePipe.declared)
    assert values["update_share"] == pytest.approx(updates / (12 * 5))
    # A layer without a gradient of its last micro-batch updates by the earlier ones.
    assert updates / (12 * 5) > len(backwards) / (12 * 6 * 5)


def test_without_a_pipeline_batches_take_as_many_slots_as_passes():
    _, chosen = plan_scenario(six_devices({"pipelined": False}))
    assert timetable_of(chosen.details).slot_count(12) == 11 * 12


def test_repetition_increases_casts_and_receptions():
    network = {"link": {"message_loss": "50%"}}
    casts, learned = [], []
    for times in (1, 2, 6):
        outcome = run_simulated(
            six_devices(
                {"recovery": "r-tx", "transmissions": times, "allocation": "vertical"},
                network=network,
            )
        )
        casts.append(len(fields_of(outcome, "cast")))
        learned.append(
            sum(each["span"] == "backward" for each in fields_of(outcome, "compute"))
        )
    assert learned[0] < learned[1] < learned[2] <= 12 * 5
    # The output layer's losses always go out; what is not learnt is not cast on.
    assert casts[0] < casts[1] < casts[2]


def cast_counts(outcome):
    return [each["message"] for each in fields_of(outcome, "cast")]


def test_acknowledged_casts_are_repeated_until_nothing_is_lost():
    network = {"link": {"message_loss": "30%"}}
    acknowledged, lost = (
        run_simulated(six_devices({"recovery": name}, network=network))
        for name in ("ack", "none")
    )
    kinds = cast_counts(acknowledged)
    value_casts = sum(kind != "heard" for kind in kinds)
    assert value_casts > 1.5 * len(cast_counts(lost))
    assert kinds.count("heard") == sum(
        each["message"] != "heard" for each in fields_of(acknowledged, "receive")
    )
    peers = [
        len(each["peers"])
        for each in fields_of(acknowledged, "cast")
        if each["message"] != "heard"
    ]
    assert min(peers) == 1
    losses = [step["loss"] for step in fields_of(run_simulated(six_devices()), "step")]
    assert [step["loss"] for step in fields_of(acknowledged, "step")] == pytest.approx(
        losses, rel=1e-5
    )
    (trial,) = trials(six_devices())
    figures = metrics(
        acknowledged,
        trial.experiment,
        plan_scenario(six_devices())[1],
        EdgePipe.declared,
    )
    assert (
        figures["update_share"]
        == figures["outputs_received"]
        == figures["losses_received"]
        == 1
    )
    assert figures["training_casts"] < len(kinds)


def test_a_cast_without_acknowledgement_ends_with_its_slot():
    devices = plan_scenario(six_devices({"mapping": "random"}))[1].details.devices
    written = lossy({"recovery": "ack"}, (devices[2], devices[0]))
    _, chosen = plan_scenario(written)
    outcome = run_simulated(written)
    steps = [event.time for event in outcome.events if event.event == "step"]
    assert [later - earlier for earlier, later in pairwise(steps)] == pytest.approx(
        [4 * chosen.details.timeslot] * 11
    )
    assert (
        sum(is_event(event, "cast", devices[2]) for event in outcome.events)
        > 12 * 4 * 2
    )


def test_metrics_count_received_parts_in_training_and_tests_apart():
    written = six_devices({"test_runs": 2, "evaluate_every": 6})
    outcome = run_simulated(written)
    (trial,) = trials(written)
    figures = metrics(
        outcome, trial.experiment, plan_scenario(written)[1], EdgePipe.declared
    )
    assert [
        figures[f"{each}_received"] for each in ("outputs", "losses", "results")
    ] == [1, 1, 1]
    # For a batch each of six devices casts the outputs of two layers, and four of them the losses of two.
    assert figures["training_casts"] == 12 * (12 + 8)
    # To the next layer's devices but oneself: 16 transmissions of outputs and results, 12 of losses.
    assert figures["training_transmissions"] == 12 * 28
    assert figures["transmissions_rate"] / figures["casts_rate"] == pytest.approx(
        28 / 20
    )
    # Twice two test runs of three batches.
    assert figures["casts"] == 12 * (12 + 8) + 2 * 2 * 3 * 12
    assert [each["step"] for each in fields_of(outcome, "test_start")] == [6, 12]


def test_the_coordinator_sends_the_arrangement_before_the_first_timeslot():
    written, usual = six_devices({"send_model_partition": True}), six_devices()
    _, chosen = plan_scenario(written)
    outcome, same = run_simulated(written), run_simulated(usual)
    assert [step["loss"] for step in fields_of(outcome, "step")] == [
        step["loss"] for step in fields_of(same, "step")
    ]
    partition_sends = {
        each["peer"]: event for event, each in sent_messages(outcome, "arrangement")
    }
    assert partition_sends.keys() == {*chosen.details.devices} - {
        chosen.details.device_coordinator
    }
    assert {event.device for event in partition_sends.values()} == {
        chosen.details.device_coordinator
    }
    assert (
        max(event.time for event in partition_sends.values())
        < chosen.details.start_time
    )
    (trial,) = trials(written)
    figures = metrics(outcome, trial.experiment, chosen, EdgePipe.declared)
    message_sizes = [
        each["bytes"]
        for kind in ("arrangement", "needs_arrangement")
        for _, each in sent_messages(outcome, kind)
    ]
    assert figures["model_partition_bytes"] == sum(message_sizes)
    assert (
        figures["bytes_sent"]
        == sum(message_sizes)
        + metrics(same, trial.experiment, chosen, EdgePipe.declared)["bytes_sent"]
    )


def sent_messages(outcome, kind):
    return [
        (each, each.fields)
        for each in outcome.events
        if each.event == "send" and each.fields["message"] == kind
    ]


def test_a_restarted_device_receives_the_arrangement_again():
    kill = {
        "kill": "worker1",
        "when": {"device": "worker1", "begins": "backward", "batch": 3},
        "for": "100ms",
    }
    outcome = run_simulated(six_devices({"send_model_partition": True}, faults=[kill]))
    assert outcome.status == "finished"
    assert (
        sum(
            each["peer"] == "worker1"
            for _, each in sent_messages(outcome, "arrangement")
        )
        == 2
    )


def test_large_test_batches_get_longer_slots():
    written = six_devices(
        {"test_batch_size": 40, "test_runs": 3, "timeslot_margin": "0s"}
    )
    _, chosen = plan_scenario(written)
    assert chosen.details.test_timeslot > chosen.details.timeslot
    (all_at_once,), (usual,) = (
        fields_of(run_simulated(each), "evaluate") for each in (written, six_devices())
    )
    assert all_at_once["accuracy"] == usual["accuracy"]
    assert all_at_once["loss"] == pytest.approx(usual["loss"], rel=1e-5)


def test_each_test_run_has_losses_of_its_own():
    network = {"link": {"message_loss": "20%"}}
    workload = {"training": {"optimizer": {"learning_rate": 0.1}}, "steps": 60}
    method = {"name": "edgepipe", "test_runs": 20}
    written = make_scenario(5, workload=workload, method=method, network=network)
    outcome = run_simulated(written)
    (tested,) = fields_of(outcome, "evaluate")
    assert tested["deviation"] > 0
    (trial,) = trials(written)
    figures = metrics(
        outcome, trial.experiment, plan_scenario(written)[1], EdgePipe.declared
    )
    assert figures["accuracy_deviation"] == tested["deviation"]
    assert figures["accuracy"] == tested["accuracy"]
    (same,) = fields_of(run_simulated(six_devices({"test_runs": 3})), "evaluate")
    (once,) = fields_of(run_simulated(six_devices()), "evaluate")
    assert same["deviation"] == once["deviation"] == 0
    assert same["accuracy"] == pytest.approx(once["accuracy"])
    assert same["loss"] == pytest.approx(once["loss"])


def lossy(method, *pairs, loss="99.9999999%", frame=None, **keys):
    links = [{"from": a, "to": b, "message_loss": loss} for a, b in pairs]
    network = {
        "link": {"rate": "20mbit", "delay": "2ms"},
        "links": links,
        "frame": frame and f"{frame}B",
    }
    return six_devices({"mapping": "random", **method}, network=network, **keys)


@pytest.mark.parametrize("model", [MLP, CNN])
def test_a_lost_part_counts_as_zero_and_stops_the_learning_of_the_layers_before(model):
    # Whatever the first device of layers 2 and 3 casts, one device of layers 0 and 1 never hears.
    _, chosen = plan_scenario(lossy({}, model=model))
    devices = chosen.details.devices
    deaf = (devices[2], devices[0])
    written = lossy({}, deaf, model=model)
    problem, chosen = plan_scenario(written)
    assert chosen.details.devices == devices
    held = planned_assignment(problem, chosen)
    outcome = run_simulated(written)
    updated = {
        name: sum(
            event.fields["span"] == "backward"
            for event in outcome.events
            if is_event(event, "compute", name)
        )
        for name in devices
    }
    (trial,) = trials(written)
    figures = metrics(outcome, trial.experiment, chosen, EdgePipe.declared)
    # Of layers 0 and 1 only layer 1 learns: never on the device that misses a loss.
    learning = {
        name: 12 * sum(name in holders for holders in held.layers[1:])
        for name in devices
    }
    assert figures["update_share"] == pytest.approx(1 - 12 / sum(learning.values()))
    assert updated == {**learning, devices[0]: 0}
    assert [step["loss"] for step in fields_of(outcome, "step")] == pytest.approx(
        frozen(written, held.neurons_of(devices[0], 1)), rel=1e-5
    )


def is_event(event, kind, device):
    return event.event == kind and event.device == device


def frozen(written, own):
    """Return the losses of training in which the first device's neurons of layer 1 never change."""
    expected = DelayedReference(written)
    first = {name: value.clone() for name, value in expected.newest.items()}
    history = [expected.newest]
    spans = train_reference(written)[1]
    rate = written.workload.training.optimizer.learning_rate
    for step in range(written.workload.steps):
        used = {
            name: history[max(0, step - spans[int(name.split(".")[0])] + 1)][name]
            for name in expected.newest
        }
        following = {
            name: history[-1][name] - rate * gradient
            for name, gradient in expected.gradients(step, used).items()
        }
        for name, value in following.items():
            if name.startswith("0."):
                value[own.start : own.stop] = first[name][own.start : own.stop]
        history.append(following)
    return expected.losses


@pytest.mark.parametrize(
    ("model", "frame"), [(MLP, None), (CNN, None), (MLP, 64), (CNN, 256)]
)
def test_lost_outputs_are_zeros_in_the_sums_of_the_next_layer_and_get_no_gradient_from_them(
    model, frame
):
    # One device of layers 2 and 3 never hears one of layers 0 and 1, or half of its frames.
    method = {"pipelined": False}
    devices = plan_scenario(lossy(method, model=model))[1].details.devices
    loss = "99.9999999%" if frame is None else "50%"
    written = lossy(
        method, (devices[0], devices[2]), loss=loss, frame=frame, model=model
    )
    problem, chosen = plan_scenario(written)
    assert chosen.details.devices == devices
    held = planned_assignment(problem, chosen)
    lost, deaf = held.neurons_of(devices[0], 1), held.neurons_of(devices[2], 2)
    expected = DelayedReference(written)
    optimizer = torch.optim.SGD(
        expected.model.parameters(),
        lr=written.workload.training.optimizer.learning_rate,
    )
    losses, missed = [], []
    for step in range(written.workload.steps):
        chosen_samples = batch(len(expected.data.train_labels), 16, problem.seed, step)
        values = torch.from_numpy(expected.data.train_images[chosen_samples])
        for number, unit in enumerate(expected.model):
            outputs = unit(values)
            if number == 1:
                # The first device of layers 0 and 1 casts twice in each step.
                part = values[:, lost.start : lost.stop]
                gaps = missing(part.detach(), step, devices, written, frame).reshape(
                    part.shape
                )
                part = part.masked_fill(gaps, 0.0)
                missed.append(float(gaps.float().mean()))
                reached = unit(
                    torch.cat(
                        [values[:, : lost.start], part, values[:, lost.stop :]], dim=1
                    )
                )
                outputs = torch.cat(
                    [reached[:, : deaf.stop], outputs[:, deaf.stop :]], dim=1
                )
                assert deaf.start == 0
            values = outputs
        loss = functional.cross_entropy(
            values, torch.from_numpy(expected.data.train_labels[chosen_samples])
        )
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    outcome = run_simulated(written)
    assert [step["loss"] for step in fields_of(outcome, "step")] == pytest.approx(
        losses, rel=1e-5
    )
    (counted,) = [
        each
        for name, each in events_of(outcome, "parts_received")
        if name == devices[2] and each["purpose"] == "forward"
    ]
    assert counted["expected"] - counted["received"] == pytest.approx(
        sum(missed), rel=1e-4
    )
    assert counted["expected"] == 12 * (
        2 + len(held.groups[held.group_of(devices[2])]) - 1
    )


def missing(values, step, devices, written, frame):
    """Return which of a device's outputs another did not hear, (samples, values)."""
    values = values.flatten(1)
    if frame is None:
        return torch.ones(values.shape, dtype=torch.bool)
    message = Message("outputs", {"batch": step, "layer": 1}, {"tensor": values})
    header = len(CastForm(devices[0], devices).header(message, devices[2:4]))
    chance = partial(
        is_received, written.seed, devices[0], devices[2], 2 * step + 1, 0.5
    )
    there = received_part(message, header, frame, chance)
    return (
        torch.ones(values.shape, dtype=torch.bool)
        if there is None
        else there.missing["tensor"]
    )


def test_a_repeated_cast_fills_missing_frames():
    network = {
        "link": {"rate": "20mbit", "delay": "2ms", "message_loss": "20%"},
        "frame": "64B",
    }
    passed = [
        metrics_of(each, run_simulated(each))
        for each in (
            six_devices({"recovery": each}, network=network) for each in RECOVERIES
        )
    ]
    shares = [each["outputs_received"] for each in passed]
    assert 0.6 < shares[0] < 0.8 < shares[1] < 0.96 < shares[2]
    assert passed[0]["update_share"] < 0.3 < passed[2]["update_share"]


RECOVERIES = ("none", "r-tx", "ack")


def metrics_of(written, outcome):
    """Return the figures as they are computed from a run that is read again, with its details as plain values."""
    (trial,) = trials(written)
    plan = plan_scenario(written)[1]
    plain = plan.model_copy(
        update={
            "details": PlanDetails.model_validate(plan.details.model_dump(mode="json"))
        }
    )
    return metrics(outcome, trial.experiment, plain, EdgePipe.declared)


@pytest.mark.parametrize("method", [{}, {"evaluate_every": 5, "test_runs": 2}])
def test_metrics_distinguish_training_from_tests(method):
    written = six_devices(method)
    outcome = run_simulated(written)
    found = metrics_of(written, outcome)
    # Two devices a layer: six casts forward, the results, four layers' losses, and who is a receiver of each.
    assert found["training_casts"] == 12 * (2 * 6 + 2 * 4)
    assert "time_to_80" not in found
    if not method:
        table, slot = (
            timetable_of(plan_scenario(written)[1].details),
            plan_scenario(written)[1].details.timeslot,
        )
        assert found["timeslots"] == table.slot_count(12)
        assert found["transmissions_rate"] == pytest.approx(
            12 * 28 / (table.slot_count(12) - 1) / slot / 6, rel=1e-3
        )


def test_mean_accuracy_covers_all_evaluations():
    written = six_devices({"evaluate_every": 5, "test_runs": 2})
    outcome = run_simulated(written)
    accuracies = [each["accuracy"] for each in fields_of(outcome, "evaluate")]
    assert len(accuracies) == 3
    found = metrics_of(written, outcome)
    assert found["accuracy_mean"] == pytest.approx(sum(accuracies) / 3)


def test_the_time_to_80_percent_excludes_tests():
    model = {"name": "mlp", "hidden": [32]}
    workload = {
        "model": model,
        "training": {"optimizer": {"learning_rate": 0.3}},
        "steps": 60,
        "batch_size": 32,
    }
    method = {"name": "edgepipe", "allocation": "horizontal", "evaluate_every": 10}
    written = make_scenario(5, workload=workload, method=method)
    outcome = run_simulated(written)
    step = next(
        (
            each["step"]
            for each in fields_of(outcome, "evaluate")
            if each["accuracy"] >= 0.8
        ),
        None,
    )
    assert step is not None
    assert metrics_of(written, outcome)["time_to_80"] == pytest.approx(
        step * 5 * plan_scenario(written)[1].details.timeslot
    )


def test_the_same_seed_loses_the_same_casts():
    network = {
        "link": {"rate": "20mbit", "delay": "2ms"},
        "radio": {"area": [50, 50], "packets": 50},
    }
    one, same = (
        fields_of(run_simulated(six_devices(network=network)), "step") for _ in range(2)
    )
    assert one == same
    assert one != fields_of(run_simulated(six_devices()), "step")


def test_a_partitioned_device_is_missing_until_the_partition_heals():
    # One of the two devices of layers 2 and 3: without its losses, layer 1 does not learn meanwhile.
    _, chosen = plan_scenario(six_devices())
    apart, before = chosen.details.devices[2], chosen.details.devices[0]
    slot = chosen.details.timeslot
    outcome = run_simulated(
        six_devices(faults=[{"partition": [[apart]], "at": "1.5s", "for": "1.2s"}])
    )
    steps = [event.time for event in outcome.events if event.event == "step"]
    assert [later - earlier for earlier, later in pairwise(steps)] == pytest.approx(
        [4 * slot] * 11
    )
    learnt = [
        event.time
        for event in outcome.events
        if is_event(event, "compute", before) and is_backward(event)
    ]
    assert not [time for time in learnt if 1.5 + slot < time < 2.7]
    assert [time for time in learnt if time < 1.5]
    assert [time for time in learnt if time > 2.7]
    # It goes on with what it has itself, and casts; nobody hears it.
    cast = [
        event.time
        for event in outcome.events
        if is_event(event, "cast", apart) and 1.5 < event.time < 2.7
    ]
    heard = [
        event
        for event in outcome.events
        if event.event == "receive" and event.fields["peer"] == apart
    ]
    assert cast
    assert not [event for event in heard if 1.5 + slot < event.time < 2.7]
    assert max(event.time for event in heard) > 2.7


def is_backward(event):
    return event.fields["span"] == "backward"


def test_training_continues_while_a_device_is_off_and_after_its_restart():
    written = six_devices()
    _, chosen = plan_scenario(written)
    victim = chosen.details.devices[0]
    faults = [{"kill": victim, "at": "0.5s", "for": "0.5s"}]
    outcome = run_simulated(six_devices(faults=faults))
    slot = chosen.details.timeslot
    steps = [event.time for event in outcome.events if event.event == "step"]
    assert [later - earlier for earlier, later in pairwise(steps)] == pytest.approx(
        [4 * slot] * 11
    )
    assert len(fields_of(outcome, "evaluate")) == 1
    begun = [event.time for event in outcome.events if is_event(event, "begin", victim)]
    assert not [time for time in begun if 0.5 < time < 1]
    assert min(begun) < 0.5
    assert max(begun) > 1


@pytest.mark.parametrize(
    ("keys", "key", "said"),
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
            "receives no cast of",
        ),
        (
            {"method": {"micro_batches": 2}},
            ("method", "micro_batches"),
            "is GPipe, which divides layer by layer",
        ),
        (
            {"method": {**GPIPE, "micro_batches": 17}},
            ("method", "micro_batches"),
            "a batch of 16 samples into",
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
def test_impossible_plans_are_refused_with_their_key(keys, key, said):
    keys = dict(keys)
    workload = {**SIX["workload"], **keys.pop("workload", {})}
    method = {"name": "edgepipe", **keys.pop("method", {})}
    problem, _ = problem_of(
        make_scenario(keys.pop("workers", 5), workload=workload, method=method, **keys)
    )
    with pytest.raises(InputError, match=said) as caught:
        EdgePipe().plan(problem)
    assert caught.value.key == key


def test_acknowledgements_need_a_way_back():
    # What holds the input layer alone has to hear nothing but acknowledgements.
    method = {"allocation": "vertical", "mapping": "random"}
    deaf = plan_scenario(six_devices(method))[1].details.devices[0]
    others = [
        name
        for name in ("source", *(f"worker{number}" for number in range(1, 6)))
        if name != deaf
    ]
    network = {
        "links": [{"from": name, "to": deaf, "message_loss": "100%"} for name in others]
    }
    assert plan_scenario(six_devices(method, network=network))
    with pytest.raises(InputError, match="ack needs a return path") as caught:
        plan_scenario(six_devices({**method, "recovery": "ack"}, network=network))
    assert caught.value.key == ("method", "recovery")


def test_acknowledgements_are_awaited_as_long_as_the_slowest_link_takes():
    slow = {"from": "worker2", "to": "worker3", "rate": "10kbit"}
    problem, chosen = plan_scenario(
        six_devices(
            {"recovery": "ack"}, network={"link": {"rate": "20mbit"}, "links": [slow]}
        )
    )
    known, plan = EdgePipe().facts(problem, chosen, "worker1")
    assert ("worker2", "worker3") not in known.links
    answered = dict(
        zip(plan.details.devices, plan.details.acknowledgement_seconds, strict=True)
    )
    # What worker2 casts goes at the rate of its slowest link, whoever hears it.
    assert answered["worker1"] > 8 * size_around(0) / 10e3


def test_losses_of_outputs_that_nobody_received_are_masked_by_default():
    network = {"link": {"rate": "20mbit", "delay": "2ms", "message_loss": "30%"}}
    outcomes = [
        run_simulated(six_devices({"allocation": "hybrid", **masks}, network=network))
        for masks in ({}, {"mask_missing_outputs": False})
    ]
    masked, unmasked = (
        [each["loss"] for each in fields_of(outcome, "step")] for outcome in outcomes
    )
    assert masked[0] == unmasked[0]
    assert masked != unmasked
    explicit = run_simulated(
        six_devices(
            {"allocation": "hybrid", "mask_missing_outputs": True}, network=network
        )
    )
    assert [each["loss"] for each in fields_of(explicit, "step")] == masked
