"""Tests of the average of models on the server."""

import pytest
import torch

from testbed.ml.rounds.server import average


def test_models_are_weighted_by_their_samples() -> None:
    states = [
        {"0.weight": torch.tensor([1.0, 10.0]), "0.bias": torch.tensor([0.0])},
        {"0.weight": torch.tensor([5.0, 20.0]), "0.bias": torch.tensor([8.0])},
        {"0.weight": torch.tensor([9.0, 40.0]), "0.bias": torch.tensor([4.0])},
    ]
    mean = average(states, [10, 30, 60])
    # Of 100 samples: 0.1 + 1.5 + 5.4, 1 + 6 + 24, 0 + 2.4 + 2.4.
    torch.testing.assert_close(mean["0.weight"], torch.tensor([7.0, 31.0]))
    torch.testing.assert_close(mean["0.bias"], torch.tensor([4.8]))


def test_running_statistics_are_averaged_and_largest_batch_counter_is_kept() -> None:
    states = [
        {
            "0.running_mean": torch.tensor([1.0]),
            "0.num_batches_tracked": torch.tensor(7),
        },
        {
            "0.running_mean": torch.tensor([3.0]),
            "0.num_batches_tracked": torch.tensor(5),
        },
    ]
    mean = average(states, [1, 3])
    # 1 / 4 + 3 * 3 / 4.
    assert mean["0.running_mean"].item() == 2.5
    assert mean["0.num_batches_tracked"].item() == 7
    assert mean["0.num_batches_tracked"].dtype == torch.int64


def test_average_of_one_model_is_exact() -> None:
    state = {"0.weight": torch.rand(5)}
    assert torch.equal(average([state], [17])["0.weight"], state["0.weight"])


def test_different_layers_and_missing_samples_are_rejected() -> None:
    with pytest.raises(ValueError, match="the same names"):
        average([{"0.weight": torch.zeros(1)}, {"1.weight": torch.zeros(1)}], [1, 1])
    with pytest.raises(ValueError, match="numbers of samples"):
        average([{"0.weight": torch.zeros(1)}], [0])
    with pytest.raises(ValueError, match="numbers of samples"):
        average([], [])
