"""What is learnt, exactly, on the virtual clock."""

import pytest
import torch

from testbed.ml.data.batches import batch
from testbed.ml.models import create
from testbed.ml.preparation import samples_of
from tests.helpers.server_scenarios import (
    SHAPE,
    TorchReference,
    data,
    fields_of,
    make_scenario,
    participants_by_round,
    prepare_scenario,
    run_simulated,
)

METHODS = ("federated", "split-learning", "split-federated", "pipelearn")
BATCH_NORM = {"name": "vgg5"}
VGG5 = {"name": "vgg5", "batch_norm": False}
RESNET18 = {"name": "resnet18", "batch_norm": False}


def pieces(
    spec, device: int, step: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels of a device's iteration."""
    share = samples_of(
        prepare_scenario(spec), data(spec.workload.data), f"device{device + 1}"
    )
    assert share is not None
    chosen = batch(len(share.train_labels), size, spec.seed, step)
    return torch.from_numpy(share.train_images[chosen]), torch.from_numpy(
        share.train_labels[chosen]
    )


@pytest.mark.parametrize("method", METHODS)
def test_one_device_learns_what_a_single_one_does(method: str) -> None:
    work = {"epochs": 3, "model": VGG5}
    options = {"parallel_batches": 1} if method == "pipelearn" else {}
    together = run_simulated(
        make_scenario(method, 1, workload=work, options=options)
    ).weights
    alone = run_simulated(make_scenario("single", 1, workload=work)).weights
    assert together is not None
    assert alone is not None
    assert together.keys() == alone.keys()
    exact = method == "federated"
    for name, tensor in alone.items():
        torch.testing.assert_close(
            together[name], tensor, rtol=0, atol=0 if exact else 2e-6
        )


@pytest.mark.parametrize("method", ["federated", "split-federated", "pipelearn"])
def test_devices_with_equal_shares_and_one_iteration_a_round_take_steps_with_all_their_batches(
    method: str,
) -> None:
    spec = make_scenario(
        method,
        3,
        workload={"steps": 5},
        options={"parallel_batches": 4} if method == "pipelearn" else {},
    )
    plain = TorchReference(spec)
    for step in range(5):
        images, labels = zip(
            *(pieces(spec, device, step, 16) for device in range(3)), strict=True
        )
        plain.step(torch.cat(images), torch.cat(labels))
    plain.assert_same(run_simulated(spec))


def transparent(model: dict, split: int, parallel: int, mini_batches: int = 1) -> None:
    """One iteration in ``parallel`` mini-batches is a step with the batch, seen in so many parts."""
    work = {
        "model": model,
        "steps": 1,
        "data": {"name": "digits", "train": 16, "test": 8, "split": "iid"},
        "batch_size": 13,
    }
    spec = make_scenario(
        "pipelearn",
        1,
        workload=work,
        options={"split_point": split, "parallel_batches": parallel},
    )
    plain = TorchReference(spec)
    plain.step(*pieces(spec, 0, 0, 13 // parallel * parallel), mini_batches)
    plain.assert_same(run_simulated(spec))


@pytest.mark.parametrize("parallel", [1, 3, 13])
@pytest.mark.parametrize("split", range(1, 6))
def test_an_iteration_is_a_step_with_the_whole_batch_at_every_split_point_of_vgg5(
    split: int, parallel: int
) -> None:
    transparent(VGG5, split, parallel)


@pytest.mark.parametrize(
    "split", range(1, len(create("resnet18", {}, SHAPE, 10).units) + 1)
)
def test_an_iteration_is_a_step_with_the_whole_batch_at_every_split_point_of_resnet18(
    split: int,
) -> None:
    transparent(RESNET18, split, 4)


@pytest.mark.parametrize("split", range(1, 6))
def test_batch_normalisation_sees_each_mini_batch_by_itself(split: int) -> None:
    transparent(BATCH_NORM, split, parallel=1)
    transparent(BATCH_NORM, split, parallel=3, mini_batches=3)


def test_split_learning_hands_the_model_from_device_to_device() -> None:
    spec = make_scenario(
        "split-learning",
        2,
        workload={"steps": 3, "training": {"optimizer": {"learning_rate": 0.1}}},
    )
    plain = TorchReference(spec)
    for step in range(3):
        for device in range(2):
            plain.step(*pieces(spec, device, step, 16))
    plain.assert_same(run_simulated(spec))


def test_a_fraction_of_the_devices_takes_part_by_seed_and_round() -> None:
    spec = make_scenario(
        "federated", 4, workload={"steps": 6}, options={"fraction": "50%"}
    )
    rounds = participants_by_round(run_simulated(spec))
    assert [len(names) for names in rounds] == [2] * 6
    assert len({tuple(names) for names in rounds}) > 1
    assert rounds == participants_by_round(run_simulated(spec))


def test_devices_with_fewer_samples_than_a_batch_train_with_all_they_have_and_are_named() -> (
    None
):
    def spec(batch: int):
        split = {
            "name": "digits",
            "train": 96,
            "test": 40,
            "split": {"sizes": [40, 10]},
        }
        return make_scenario(
            "federated", 2, workload={"data": split, "batch_size": batch, "steps": 1}
        )

    assert [event["text"] for event in fields_of(run_simulated(spec(16)), "log")] == [
        "device2: fewer samples than a batch of 16, so a batch has all samples of the device"
    ]
    assert not fields_of(run_simulated(spec(10)), "log")
    everyone = run_simulated(spec(41))
    assert [
        event["text"].partition(":")[0] for event in fields_of(everyone, "log")
    ] == ["device1, device2"]
    assert fields_of(everyone, "round")[0]["samples"] == {"device1": 40, "device2": 10}


def test_without_drop_last_each_epoch_has_every_sample_of_every_device() -> None:
    data = {
        "name": "digits",
        "train": 96,
        "test": 40,
        "split": {"sizes": [40, 10]},
    }
    work = {"data": data, "batch_size": 16, "epochs": 2}
    for drop_last, samples, left in (
        (True, {"device1": 32, "device2": 10}, [8]),
        (False, {"device1": 40, "device2": 10}, []),
    ):
        outcome = run_simulated(
            make_scenario("federated", 2, workload={**work, "drop_last": drop_last})
        )
        assert [each["samples"] for each in fields_of(outcome, "round")] == [
            samples
        ] * 2
        assert [each["samples"] for each in fields_of(outcome, "left_out")] == left


def test_without_drop_last_planners_and_both_ways_of_timing_count_the_last_batch() -> (
    None
):
    data = {
        "name": "digits",
        "train": 96,
        "test": 40,
        "split": {"sizes": [40, 40]},
    }
    work = {"data": data, "batch_size": 16, "epochs": 1, "drop_last": False}
    full, timed = (
        run_simulated(
            make_scenario("federated", 2, workload={**work, "numerics": each})
        )
        for each in ("full", "none")
    )
    assert fields_of(timed, "round")[0]["duration"] == pytest.approx(
        fields_of(full, "round")[0]["duration"]
    )
    clients = prepare_scenario(
        make_scenario("federated", 2, workload=work)
    ).plan.details.clients
    assert {client.round_iterations for client in clients.values()} == {3}


def test_without_drop_last_mini_batches_of_the_last_iteration_have_the_rest_of_an_epoch() -> (
    None
):
    data = {
        "name": "digits",
        "train": 96,
        "test": 40,
        "split": {"sizes": [40, 37]},
    }
    work = {"data": data, "batch_size": 16, "epochs": 1, "drop_last": False}
    options = {"split_point": 1, "parallel_batches": 3}
    full, timed = (
        run_simulated(
            make_scenario(
                "pipelearn", 2, workload={**work, "numerics": each}, options=options
            )
        )
        for each in ("full", "none")
    )
    assert fields_of(full, "round")[0]["samples"] == {"device1": 40, "device2": 37}
    assert fields_of(timed, "round")[0]["duration"] == pytest.approx(
        fields_of(full, "round")[0]["duration"]
    )
    # Iterations of three mini-batches of 5, and one of 5 and 5 or of 5 and 2.
    clients = prepare_scenario(
        make_scenario("pipelearn", 2, workload=work, options=options)
    ).plan.details.clients
    assert [
        (client.round_iterations, client.epoch_iterations)
        for client in clients.values()
    ] == [
        (3, 40 / 15),
        (3, 37 / 15),
    ]


DROPOUT_NETWORK = """
from torch import nn

def network(shape, classes):
    first = nn.Sequential(nn.Linear(64, 24), nn.Dropout(0.5), nn.Tanh())
    return nn.Sequential(nn.Flatten(), first, nn.Linear(24, 16), nn.Dropout(0.5), nn.Linear(16, classes))
"""


def test_dropout_in_a_smaller_last_iteration_ignores_its_division_into_mini_batches(
    tmp_path,
) -> None:
    file = tmp_path / "own.py"
    file.write_text(DROPOUT_NETWORK)
    work = {
        "model": {"name": "network", "file": str(file)},
        "data": {"name": "digits", "train": 33, "test": 10, "split": "iid"},
        # 33 samples are two mini-batches of 10, and one of 10 and one of 3.
        "batch_size": 20,
        "epochs": 1,
        "drop_last": False,
    }

    def trained(parallel_batches: int) -> dict[str, torch.Tensor]:
        options = {"split_point": 2, "parallel_batches": parallel_batches}
        weights = run_simulated(
            make_scenario("pipelearn", 1, workload=work, options=options)
        ).weights
        assert weights is not None
        return dict(weights)

    whole = trained(1)
    divided = trained(2)
    for name, tensor in whole.items():
        torch.testing.assert_close(divided[name], tensor, rtol=0, atol=2e-6)


def test_the_moving_average_is_that_of_the_rounds() -> None:
    def left(steps: int, **training: object) -> dict[str, torch.Tensor]:
        work = {
            "steps": steps,
            "training": {"optimizer": {"learning_rate": 0.1}, **training},
        }
        weights = run_simulated(make_scenario("federated", 2, workload=work)).weights
        assert weights is not None
        return weights

    first, second, third = (left(steps) for steps in (1, 2, 3))
    for name, tensor in left(3, ema=0.75).items():
        expected = (
            0.75 * (0.75 * first[name] + 0.25 * second[name]) + 0.25 * third[name]
        )
        assert torch.allclose(tensor, expected, atol=1e-6), name
