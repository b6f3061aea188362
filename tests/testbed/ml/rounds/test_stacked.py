"""Devices whose training is computed together learn what they learn one by one, at the same times."""

import pytest
import torch

from testbed.common.errors import InputError
from tests.helpers.runs import fields_of
from tests.helpers.server_scenarios import make_scenario, run_simulated
from tests.testbed.ml.rounds.test_timing_only import told

PLAIN = {"optimizer": {"learning_rate": 0.1, "weight_decay": 0.001}}


def both(devices: int, **keys):
    work = keys.pop("workload", {})
    return [
        run_simulated(
            make_scenario(
                "federated",
                devices,
                workload={
                    "batch_size": 14,
                    "training": PLAIN,
                    **work,
                    "numerics": numerics,
                },
                **keys,
            )
        )
        for numerics in ("full", "stacked")
    ]


@pytest.mark.parametrize(
    ("work", "options"),
    [
        ({"epochs": 3}, {}),
        (
            {
                "epochs": 4,
                "training": {**PLAIN, "schedule": {"name": "step", "step_size": 2}},
            },
            {"local_epochs": 2},
        ),
        (
            {"steps": 3, "model": {"name": "vgg5", "batch_norm": False}},
            {"transfer": {"updates": {"top_k": "10%"}}},
        ),
    ],
    ids=["epochs", "schedule", "convolutions"],
)
def test_what_is_learnt_is_the_same_but_for_rounding_and_no_time_differs(
    work, options
) -> None:
    # 96 samples of 7 devices: shares of 13 and 14, which are batches of two sizes.
    one_by_one, together = both(7, workload=work, options=options)
    assert told(together) == told(one_by_one)
    assert one_by_one.weights is not None
    assert together.weights is not None
    for name, tensor in one_by_one.weights.items():
        torch.testing.assert_close(together.weights[name], tensor, rtol=0, atol=1e-6)
    losses = [
        [each["loss"] for each in fields_of(outcome, "step")]
        for outcome in (one_by_one, together)
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


def test_a_device_that_dies_meanwhile_changes_nothing() -> None:
    one_by_one, together = both(
        3, workload={"epochs": 3}, faults=[{"kill": "device1", "at": "1s", "for": "3s"}]
    )
    assert told(together) == told(one_by_one)
    for name, tensor in (one_by_one.weights or {}).items():
        torch.testing.assert_close(
            (together.weights or {})[name], tensor, rtol=0, atol=1e-6
        )


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        ({"training": {"optimizer": {"momentum": 0.9}}}, "momentum"),
        ({"training": {"clip": {"norm": 1}}}, "clipping"),
        ({"training": PLAIN, "model": {"name": "vgg5"}}, "batch normalisation"),
    ],
)
def test_what_cannot_be_stacked_is_refused(work, reason) -> None:
    with pytest.raises(InputError, match=reason):
        run_simulated(
            make_scenario("federated", 2, workload={**work, "numerics": "stacked"})
        )


def test_methods_that_do_not_train_whole_models_are_refused() -> None:
    with pytest.raises(InputError, match="stacked"):
        run_simulated(
            make_scenario(
                "split-federated",
                2,
                workload={"training": PLAIN, "numerics": "stacked"},
            )
        )
