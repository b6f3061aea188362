"""Tests of `numerics: stacked`: devices trained together have the weights and times of separate training."""

import pytest
import torch

from testbed.common.errors import InputError
from tests.helpers.server_scenarios import make_scenario, run_simulated
from tests.testbed.ml.outcomes import events_without_values, field_values

PLAIN_SGD = {"optimizer": {"learning_rate": 0.1, "weight_decay": 0.001}}


def run_separate_and_stacked(devices: int, workload: dict, **keys):
    """Return the outcomes of a federated training with `full` and with `stacked` numerics."""
    outcomes = []
    for numerics in ("full", "stacked"):
        variant = {"batch_size": 14, "training": PLAIN_SGD} | workload
        variant["numerics"] = numerics
        spec = make_scenario("federated", devices, workload=variant, **keys)
        outcomes.append(run_simulated(spec))
    return outcomes


def assert_close_weights(stacked, separate) -> None:
    # Sums over a stack of devices are rounded in another order.
    for name, tensor in separate.items():
        torch.testing.assert_close(stacked[name], tensor, rtol=0, atol=1e-6)


STEP_SCHEDULE = {"name": "step", "step_size": 2}


@pytest.mark.parametrize(
    ("workload", "options"),
    [
        pytest.param({"epochs": 3}, {}, id="epochs"),
        pytest.param(
            {"epochs": 4, "training": {**PLAIN_SGD, "schedule": STEP_SCHEDULE}},
            {"local_epochs": 2},
            id="schedule",
        ),
        pytest.param(
            {"steps": 3, "model": {"name": "vgg5", "batch_norm": False}},
            {"transfer": {"updates": {"top_k": "10%"}}},
            id="convolutions",
        ),
    ],
)
def test_stacked_training_has_equal_times_and_weights_up_to_rounding(
    workload, options
) -> None:
    # 96 samples of 7 devices: shares of 13 and 14, which are batches of two sizes.
    separate, stacked = run_separate_and_stacked(7, workload, options=options)
    assert events_without_values(stacked) == events_without_values(separate)
    assert separate.weights is not None
    assert stacked.weights is not None
    assert_close_weights(stacked.weights, separate.weights)
    losses = field_values(separate, "step", "loss")
    assert field_values(stacked, "step", "loss") == pytest.approx(losses, abs=1e-6)


def test_stacked_training_with_killed_device_equals_separate_training() -> None:
    separate, stacked = run_separate_and_stacked(
        3, {"epochs": 3}, faults=[{"kill": "device1", "at": "1s", "for": "3s"}]
    )
    assert events_without_values(stacked) == events_without_values(separate)
    assert_close_weights(stacked.weights or {}, separate.weights or {})


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        ({"training": {"optimizer": {"momentum": 0.9}}}, "momentum"),
        ({"training": {"clip": {"norm": 1}}}, "clipping"),
        ({"training": PLAIN_SGD, "model": {"name": "vgg5"}}, "batch normalisation"),
    ],
    ids=["momentum", "clipping", "batch-normalisation"],
)
def test_training_that_cannot_be_stacked_is_rejected(workload, reason) -> None:
    keys = {**workload, "numerics": "stacked"}
    with pytest.raises(InputError, match=reason):
        run_simulated(make_scenario("federated", 2, workload=keys))


def test_split_method_rejects_stacked_training() -> None:
    workload = {"training": PLAIN_SGD, "numerics": "stacked"}
    with pytest.raises(InputError, match="stacked"):
        run_simulated(make_scenario("split-federated", 2, workload=workload))
