"""Tests of weights trained in rounds, against the undivided model trained by torch."""

import pytest
import torch

from testbed.ml.data.batches import batch
from testbed.ml.models import create
from testbed.ml.preparation import samples_of
from tests.helpers.server_scenarios import (
    SHAPE,
    TorchReference,
    fields_of,
    load_cached,
    make_scenario,
    participants_by_round,
    prepare_scenario,
    run_simulated,
)
from tests.testbed.ml.outcomes import field_values

METHODS = ("federated", "split-learning", "split-federated", "pipelearn")
BATCH_NORM = {"name": "vgg5"}
VGG5 = {"name": "vgg5", "batch_norm": False}
RESNET18 = {"name": "resnet18", "batch_norm": False}


def read_batch(
    spec, device: int, step: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels of one iteration of a device, numbered from 0."""
    prepared = prepare_scenario(spec)
    dataset = load_cached(spec.workload.data)
    share = samples_of(prepared, dataset, f"device{device + 1}")
    assert share is not None
    chosen = batch(len(share.train_labels), size, spec.seed, step)
    images = torch.from_numpy(share.train_images[chosen])
    return images, torch.from_numpy(share.train_labels[chosen])


def trained_weights(spec) -> dict[str, torch.Tensor]:
    weights = run_simulated(spec).weights
    assert weights is not None
    return dict(weights)


@pytest.mark.parametrize("method", METHODS)
def test_training_with_one_device_equals_single_device_training(method: str) -> None:
    workload = {"epochs": 3, "model": VGG5}
    options = {"parallel_batches": 1} if method == "pipelearn" else {}
    weights = trained_weights(
        make_scenario(method, 1, workload=workload, options=options)
    )
    single = trained_weights(make_scenario("single", 1, workload=workload))
    assert weights.keys() == single.keys()
    # A model that is split between device and server sums in another order.
    tolerance = 0 if method == "federated" else 2e-6
    for name, tensor in single.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=tolerance)


@pytest.mark.parametrize("method", ["federated", "split-federated", "pipelearn"])
def test_one_iteration_per_round_is_step_with_batches_of_all_devices(
    method: str,
) -> None:
    options = {"parallel_batches": 4} if method == "pipelearn" else {}
    spec = make_scenario(method, 3, workload={"steps": 5}, options=options)
    reference = TorchReference(spec)
    for step in range(5):
        batches = [read_batch(spec, device, step, 16) for device in range(3)]
        images, labels = zip(*batches, strict=True)
        # The devices have equally many samples, so the mean of their gradients is that of the joined batch.
        reference.step(torch.cat(images), torch.cat(labels))
    reference.assert_same(run_simulated(spec))


def check_pipelearn_iteration(
    model: dict, split_point: int, parallel_batches: int, mini_batches: int = 1
) -> None:
    """Compare an iteration in ``parallel_batches`` parts with one step of torch in ``mini_batches`` parts."""
    workload = {
        "model": model,
        "steps": 1,
        "data": {"name": "digits", "train": 16, "test": 8, "split": "iid"},
        "batch_size": 13,
    }
    options = {"split_point": split_point, "parallel_batches": parallel_batches}
    spec = make_scenario("pipelearn", 1, workload=workload, options=options)
    reference = TorchReference(spec)
    # Mini-batches have equal sizes; the remaining samples of a batch belong to the next batch.
    used_samples = 13 // parallel_batches * parallel_batches
    reference.step(*read_batch(spec, 0, 0, used_samples), mini_batches)
    reference.assert_same(run_simulated(spec))


@pytest.mark.parametrize("parallel_batches", [1, 3, 13])
@pytest.mark.parametrize("split_point", range(1, 6))
def test_iteration_equals_step_with_whole_batch_at_each_split_point_of_vgg5(
    split_point: int, parallel_batches: int
) -> None:
    check_pipelearn_iteration(VGG5, split_point, parallel_batches)


@pytest.mark.parametrize(
    "split_point", range(1, len(create("resnet18", {}, SHAPE, 10).units) + 1)
)
def test_iteration_equals_step_with_whole_batch_at_each_split_point_of_resnet18(
    split_point: int,
) -> None:
    check_pipelearn_iteration(RESNET18, split_point, parallel_batches=4)


@pytest.mark.parametrize("split_point", range(1, 6))
def test_batch_normalisation_normalises_each_mini_batch_separately(
    split_point: int,
) -> None:
    check_pipelearn_iteration(BATCH_NORM, split_point, parallel_batches=1)
    check_pipelearn_iteration(
        BATCH_NORM, split_point, parallel_batches=3, mini_batches=3
    )


def test_split_learning_passes_model_from_device_to_device() -> None:
    training = {"optimizer": {"learning_rate": 0.1}}
    spec = make_scenario(
        "split-learning", 2, workload={"steps": 3, "training": training}
    )
    reference = TorchReference(spec)
    # The devices of a round take steps one after the other.
    for step in range(3):
        for device in range(2):
            reference.step(*read_batch(spec, device, step, 16))
    reference.assert_same(run_simulated(spec))


def test_fraction_of_devices_is_drawn_for_each_round_by_seed() -> None:
    spec = make_scenario(
        "federated", 4, workload={"steps": 6}, options={"fraction": "50%"}
    )
    rounds = participants_by_round(run_simulated(spec))
    assert [len(names) for names in rounds] == [2] * 6
    assert len({tuple(names) for names in rounds}) > 1
    assert rounds == participants_by_round(run_simulated(spec))


def split_digits(*sizes: int) -> dict:
    """Return data of two devices with these numbers of samples."""
    split = {"sizes": list(sizes)}
    return {"name": "digits", "train": 96, "test": 40, "split": split}


def test_devices_with_less_than_one_batch_train_on_all_samples_and_are_logged() -> None:
    def run_with_batch(size: int):
        workload = {"data": split_digits(40, 10), "batch_size": size, "steps": 1}
        return run_simulated(make_scenario("federated", 2, workload=workload))

    assert field_values(run_with_batch(16), "log", "text") == [
        "device2: fewer samples than a batch of 16, so a batch has all samples of the device"
    ]
    assert not fields_of(run_with_batch(10), "log")
    # No device has 41 samples.
    outcome = run_with_batch(41)
    (text,) = field_values(outcome, "log", "text")
    assert text.startswith("device1, device2:")
    samples = field_values(outcome, "round", "samples")[0]
    assert samples == {"device1": 40, "device2": 10}


@pytest.mark.parametrize(
    ("drop_last", "samples", "skipped"),
    [
        # Of 40 samples, batches of 16 skip 8.
        (True, {"device1": 32, "device2": 10}, [8]),
        (False, {"device1": 40, "device2": 10}, []),
    ],
)
def test_epoch_has_every_sample_unless_last_batch_is_dropped(
    drop_last: bool, samples: dict, skipped: list
) -> None:
    workload = {
        "data": split_digits(40, 10),
        "batch_size": 16,
        "epochs": 2,
        "drop_last": drop_last,
    }
    outcome = run_simulated(make_scenario("federated", 2, workload=workload))
    assert field_values(outcome, "round", "samples") == [samples] * 2
    assert field_values(outcome, "left_out", "samples") == skipped


def run_full_and_timing_only(method: str, workload: dict, **keys):
    """Run with values and without, and compare the durations of the first rounds; return the full outcome."""
    outcomes = []
    for numerics in ("full", "none"):
        variant = {**workload, "numerics": numerics}
        outcomes.append(
            run_simulated(make_scenario(method, 2, workload=variant, **keys))
        )
    full, timed = outcomes
    duration = field_values(full, "round", "duration")[0]
    timed_duration = field_values(timed, "round", "duration")[0]
    assert timed_duration == pytest.approx(duration)
    return full


def test_planner_and_timing_only_run_count_smaller_last_batch() -> None:
    workload = {
        "data": split_digits(40, 40),
        "batch_size": 16,
        "epochs": 1,
        "drop_last": False,
    }
    run_full_and_timing_only("federated", workload)
    prepared = prepare_scenario(make_scenario("federated", 2, workload=workload))
    clients = prepared.plan.details.clients.values()
    # Batches of 16, 16 and 8.
    assert {client.round_iterations for client in clients} == {3}


def test_mini_batches_of_last_iteration_have_remaining_samples_of_epoch() -> None:
    workload = {
        "data": split_digits(40, 37),
        "batch_size": 16,
        "epochs": 1,
        "drop_last": False,
    }
    options = {"split_point": 1, "parallel_batches": 3}
    full = run_full_and_timing_only("pipelearn", workload, options=options)
    samples = field_values(full, "round", "samples")[0]
    assert samples == {"device1": 40, "device2": 37}
    # Iterations of three mini-batches of 5, and one of 5 and 5 or of 5 and 2.
    prepared = prepare_scenario(
        make_scenario("pipelearn", 2, workload=workload, options=options)
    )
    first, second = prepared.plan.details.clients.values()
    assert (first.round_iterations, first.epoch_iterations) == (3, 40 / 15)
    assert (second.round_iterations, second.epoch_iterations) == (3, 37 / 15)


DROPOUT_NETWORK = """
from torch import nn

def network(shape, classes):
    first = nn.Sequential(nn.Linear(64, 24), nn.Dropout(0.5), nn.Tanh())
    return nn.Sequential(nn.Flatten(), first, nn.Linear(24, 16), nn.Dropout(0.5), nn.Linear(16, classes))
"""


def test_dropout_in_smaller_last_iteration_is_independent_of_mini_batches(
    tmp_path,
) -> None:
    file = tmp_path / "own.py"
    file.write_text(DROPOUT_NETWORK)
    workload = {
        "model": {"name": "network", "file": str(file)},
        "data": {"name": "digits", "train": 33, "test": 10, "split": "iid"},
        # 33 samples are two mini-batches of 10, and one of 10 and one of 3.
        "batch_size": 20,
        "epochs": 1,
        "drop_last": False,
    }

    def train(parallel_batches: int) -> dict[str, torch.Tensor]:
        options = {"split_point": 2, "parallel_batches": parallel_batches}
        return trained_weights(
            make_scenario("pipelearn", 1, workload=workload, options=options)
        )

    undivided = train(1)
    divided = train(2)
    for name, tensor in undivided.items():
        torch.testing.assert_close(divided[name], tensor, rtol=0, atol=2e-6)


def test_ema_averages_global_model_over_rounds() -> None:
    def train(steps: int, **training: object) -> dict[str, torch.Tensor]:
        optimizer = {"learning_rate": 0.1}
        workload = {"steps": steps, "training": {"optimizer": optimizer, **training}}
        return trained_weights(make_scenario("federated", 2, workload=workload))

    first, second, third = (train(steps) for steps in (1, 2, 3))
    for name, tensor in train(3, ema=0.75).items():
        # The average begins with the weights of the first round.
        after_second = 0.75 * first[name] + 0.25 * second[name]
        expected = 0.75 * after_second + 0.25 * third[name]
        assert torch.allclose(tensor, expected, atol=1e-6), name
