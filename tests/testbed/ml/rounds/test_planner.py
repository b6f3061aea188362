"""Plans of training in rounds, against what the devices then do."""

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
from tests.helpers.collaborating import prepare_scenario, scenario


def team(method: str = "split-learning", devices: int = 2, **keys) -> Participants:
    return Participants(prepare_scenario(scenario(method, devices, **keys)).problem)


def client_plan(split_point: int, parallel_batches: int = 1) -> ClientPlan:
    return ClientPlan(
        split_point=split_point,
        parallel_batches=parallel_batches,
        iteration_time=2.0,
        exchange_time=0.5,
        round_iterations=3,
        epoch_iterations=6,
    )


def test_a_server_that_serves_one_after_the_other_keeps_layers_for_each_split_point() -> (
    None
):
    """One device has a unit, the others three: what the server trains for them begins there, and it keeps both."""
    found = split_plan(
        "split-learning", team(devices=3), {"device1": 3, "device2": 1, "device3": 3}, 1
    )
    model, batch = team().problem.model, 16
    served = found.assignments_of("server")[1:]
    assert [
        (assignment.start, assignment.stop, assignment.copy_for)
        for assignment in served
    ] == [
        (3, 3, None),
        (1, 3, None),
    ]
    # SGD with momentum keeps one value for each parameter.
    assert [assignment.memory for assignment in served] == [
        training_bytes(model, range(first, 3), batch, 1) for first in (3, 1)
    ]
    evaluating = inference_bytes(model, range(3), batch)
    assert found.memory("server") == evaluating + sum(
        assignment.memory for assignment in served
    )


def test_devices_with_one_split_point_share_what_the_server_keeps_of_the_largest_mini_batch() -> (
    None
):
    found = team(
        devices=3,
        workload={
            "data": {
                "name": "digits",
                "train": 46,
                "test": 8,
                "split": {"sizes": [20, 8, 16]},
            }
        },
    )
    made = plan(
        "m",
        found,
        dict.fromkeys(found.names, client_plan(1)),
        dict.fromkeys(found.names, 1),
        in_turn=True,
    )
    (assignment,) = made.assignments_of("server")[1:]
    assert assignment.memory == training_bytes(found.problem.model, range(1, 3), 16, 1)


def test_a_server_that_serves_all_at_once_keeps_a_copy_for_each() -> None:
    found = split_plan("split-federated", team("split-federated", 3), 1, 3)
    assert [
        assignment.copy_for for assignment in found.assignments_of("server")[1:]
    ] == [
        "device1",
        "device2",
        "device3",
    ]


def test_a_round_of_turns_is_as_long_as_all_of_them_and_one_of_all_at_once_as_the_slowest() -> (
    None
):
    found = team(devices=2)
    clients = {
        "device1": client_plan(1),
        "device2": client_plan(1).model_copy(update={"round_iterations": 5}),
    }
    assert [each.round_time for each in clients.values()] == [6.5, 10.5]
    turns = plan("m", found, clients, dict.fromkeys(clients, 1), in_turn=True)
    model, server = found.problem.model, found.server
    assert turns.step_time == pytest.approx(
        6.5 + 10.5 + 2 * aggregation_time(model, server, 1)
    )
    together = plan("m", found, clients, dict.fromkeys(clients, 1))
    assert together.step_time == pytest.approx(
        10.5 + aggregation_time(model, server, 2)
    )


def test_the_best_split_point_is_that_of_the_quickest_epoch() -> None:
    found = team(speed="20kflops", server="20mflops")
    best = split_plan("split-learning", found, "best", 1).details.clients["device1"]
    each = {
        split: split_plan("split-learning", found, split, 1).details.clients["device1"]
        for split in (1, 2, 3)
    }
    quickest = min(
        each,
        key=lambda split: (
            each[split].iteration_time * each[split].epoch_iterations
            + each[split].exchange_time
        ),
    )
    assert best == each[quickest]


def test_a_given_number_of_mini_batches_is_kept_to_and_one_beyond_the_batch_refused() -> (
    None
):
    found = split_plan(
        "pipelearn", team("pipelearn"), "best", 2, {"device1": 2, "device2": 4}
    )
    assert [each.parallel_batches for each in found.details.clients.values()] == [2, 4]
    with pytest.raises(InputError, match="17 is out of range: use 1 to 16"):
        split_plan("pipelearn", team("pipelearn"), "best", 2, 17)
    with pytest.raises(
        InputError, match="name each of the devices device1, device2, and no other"
    ):
        split_plan("pipelearn", team("pipelearn"), {"device1": 1}, 2)
    with pytest.raises(InputError, match="4 is out of range: use 1 to 3"):
        split_plan("pipelearn", team("pipelearn"), 4, 2)


def test_a_device_that_trains_all_by_itself_sends_its_weights_and_nothing_else() -> (
    None
):
    found = team("federated")
    made = whole_plan("federated", found)
    mine = made.details.clients["device1"]
    assert (mine.split_point, mine.parallel_batches) == (3, 1)
    assert [
        (assignment.device, assignment.start, assignment.stop)
        for assignment in made.assignments
    ] == [
        ("server", 0, 3),
        ("device1", 0, 3),
        ("device2", 0, 3),
    ]
    parameters = sum(unit.parameters for unit in found.problem.model.units)
    # There and back over a link of 1 Mbit/s and 2 ms.
    assert mine.exchange_time == pytest.approx(
        2 * (size_around(4 * parameters) * 8 / 1e6 + 0.002)
    )


def test_without_a_server_all_devices_have_data_and_the_first_one_evaluates() -> None:
    found = Participants(
        prepare_scenario(scenario("federated", 2)).problem, serverless=True
    )
    assert found.names == ("server", "device1", "device2")
    assert found.server.name == "server"


def test_each_device_is_given_its_own_work_alone() -> None:
    details = whole_plan("federated", team("federated")).details
    assert list(details.part_of("device2").clients) == ["device2"]
    assert details.part_of("server").clients == {}
