"""Tests of plans of training in rounds: split points, memory of the server, and predicted times."""

from __future__ import annotations

import pytest

from testbed.common.errors import InputError
from testbed.ml.partition.memory import inference_bytes, training_bytes
from testbed.ml.rounds.estimate import aggregation_time
from testbed.ml.rounds.planner import (
    ClientPlan,
    Participants,
    plan,
    split_plan,
    whole_plan,
)
from testbed.wire.message import size_around
from tests.helpers.server_scenarios import make_scenario, prepare_scenario


def make_participants(
    method: str = "split-learning", devices: int = 2, **keys
) -> Participants:
    """Return the participants of a scenario whose model has 3 units."""
    return Participants(
        prepare_scenario(make_scenario(method, devices, **keys)).problem
    )


def client_plan(round_iterations: int = 3) -> ClientPlan:
    """Return a plan whose round takes 2 s an iteration and 0.5 s for the exchange of weights."""
    return ClientPlan(
        split_point=1,
        parallel_batches=1,
        iteration_time=2.0,
        exchange_time=0.5,
        round_iterations=round_iterations,
        epoch_iterations=6,
    )


def training_assignments(plan):
    """Return the server's units for training, without the whole model for evaluations."""
    return plan.assignments_of("server")[1:]


def test_server_serving_in_turn_keeps_layers_for_each_split_point() -> None:
    split_points = {"device1": 3, "device2": 1, "device3": 3}
    split = split_plan("split-learning", make_participants(devices=3), split_points, 1)
    model = make_participants().problem.model
    assignments = training_assignments(split)
    memory = inference_bytes(model, range(3), 16)
    # The units after split points 3 and 1, in the order of the devices.
    for assignment, first in zip(assignments, (3, 1), strict=True):
        assert (assignment.start, assignment.stop) == (first, 3)
        assert assignment.copy_for is None
        # SGD with momentum keeps one value for each parameter.
        assert assignment.memory == training_bytes(model, range(first, 3), 16, 1)
        memory += assignment.memory
    assert split.memory("server") == memory


def test_devices_with_equal_split_point_share_layers_for_largest_mini_batch() -> None:
    split = {"sizes": [20, 8, 16]}
    data = {"name": "digits", "train": 46, "test": 8, "split": split}
    participants = make_participants(devices=3, workload={"data": data})
    in_turn = plan(
        "m",
        participants,
        dict.fromkeys(participants.names, client_plan()),
        dict.fromkeys(participants.names, 1),
        in_turn=True,
    )
    (assignment,) = training_assignments(in_turn)
    # The largest mini-batch is a batch of 16, although one device has fewer samples.
    model = participants.problem.model
    assert assignment.memory == training_bytes(model, range(1, 3), 16, 1)


def test_server_serving_all_at_once_keeps_copy_for_each_device() -> None:
    participants = make_participants("split-federated", 3)
    split = split_plan("split-federated", participants, 1, 3)
    owners = [assignment.copy_for for assignment in training_assignments(split)]
    assert owners == ["device1", "device2", "device3"]


def test_round_time_is_sum_of_turns_or_slowest_parallel_device() -> None:
    participants = make_participants(devices=2)
    clients = {"device1": client_plan(), "device2": client_plan(round_iterations=5)}
    # 2 s for each iteration, and 0.5 s.
    assert clients["device1"].round_time == 6.5
    assert clients["device2"].round_time == 10.5
    model = participants.problem.model
    # With turns the server handles one model after each device, otherwise both at once.
    one_model = aggregation_time(model, participants.server, 1)
    two_models = aggregation_time(model, participants.server, 2)
    copies = dict.fromkeys(clients, 1)
    in_turn = plan("m", participants, clients, copies, in_turn=True)
    assert in_turn.step_time == pytest.approx(6.5 + 10.5 + 2 * one_model)
    parallel = plan("m", participants, clients, copies)
    assert parallel.step_time == pytest.approx(10.5 + two_models)


def test_best_split_point_has_quickest_epoch() -> None:
    participants = make_participants(device_speed="20kflops", server_speed="20mflops")

    def client_with(split_point) -> ClientPlan:
        split = split_plan("split-learning", participants, split_point, 1)
        return split.details.clients["device1"]

    def epoch_time(client: ClientPlan) -> float:
        return client.iteration_time * client.epoch_iterations + client.exchange_time

    candidates = [client_with(split_point) for split_point in (1, 2, 3)]
    assert client_with("best") == min(candidates, key=epoch_time)


def test_configured_number_of_mini_batches_is_used() -> None:
    participants = make_participants("pipelearn")
    numbers = {"device1": 2, "device2": 4}
    split = split_plan("pipelearn", participants, "best", 2, numbers)
    clients = split.details.clients.values()
    assert [client.parallel_batches for client in clients] == [2, 4]


def test_invalid_split_point_or_number_of_mini_batches_is_rejected() -> None:
    participants = make_participants("pipelearn")
    with pytest.raises(InputError, match="17 is out of range: use 1 to 16"):
        split_plan("pipelearn", participants, "best", 2, 17)
    with pytest.raises(
        InputError, match="name each of the devices device1, device2, and no other"
    ):
        split_plan("pipelearn", participants, {"device1": 1}, 2)
    with pytest.raises(InputError, match="4 is out of range: use 1 to 3"):
        split_plan("pipelearn", participants, 4, 2)


def test_device_training_whole_model_exchanges_only_weights() -> None:
    participants = make_participants("federated")
    federated = whole_plan("federated", participants)
    client = federated.details.clients["device1"]
    assert client.split_point == 3
    assert client.parallel_batches == 1
    devices = []
    for assignment in federated.assignments:
        assert (assignment.start, assignment.stop) == (0, 3)
        devices.append(assignment.device)
    assert devices == ["server", "device1", "device2"]
    parameters = participants.problem.model.parameters
    # There and back over a link of 1 Mbit/s and 2 ms.
    one_way = size_around(4 * parameters) * 8 / 1e6 + 0.002
    assert client.exchange_time == pytest.approx(2 * one_way)


def test_without_server_all_devices_have_data_and_first_evaluates() -> None:
    problem = prepare_scenario(make_scenario("federated", 2)).problem
    participants = Participants(problem, serverless=True)
    assert participants.names == ("server", "device1", "device2")
    assert participants.server.name == "server"


def test_each_device_receives_only_its_own_part_of_plan() -> None:
    details = whole_plan("federated", make_participants("federated")).details
    assert list(details.part_of("device2").clients) == ["device2"]
    assert details.part_of("server").clients == {}
