import pytest
import torch

from testbed.ml.rounds.server import average


def test_models_weigh_as_many_samples_as_they_saw() -> None:
    states = [
        {"0.weight": torch.tensor([1.0, 10.0]), "0.bias": torch.tensor([0.0])},
        {"0.weight": torch.tensor([5.0, 20.0]), "0.bias": torch.tensor([8.0])},
        {"0.weight": torch.tensor([9.0, 40.0]), "0.bias": torch.tensor([4.0])},
    ]
    # 10, 30 and 60 samples: 0.1 + 1.5 + 5.4, 1 + 6 + 24, 0 + 2.4 + 2.4.
    found = average(states, [10, 30, 60])
    torch.testing.assert_close(found["0.weight"], torch.tensor([7.0, 31.0]))
    torch.testing.assert_close(found["0.bias"], torch.tensor([4.8]))


def test_running_statistics_are_averaged_and_batches_seen_are_the_most() -> None:
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
    found = average(states, [1, 3])
    assert found["0.running_mean"].item() == 2.5
    assert found["0.num_batches_tracked"].item() == 7
    assert found["0.num_batches_tracked"].dtype == torch.int64


def test_the_average_of_one_model_is_itself_to_the_bit() -> None:
    state = {"0.weight": torch.rand(5)}
    assert torch.equal(average([state], [17])["0.weight"], state["0.weight"])


def test_models_of_other_layers_and_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="different layers"):
        average([{"0.weight": torch.zeros(1)}, {"1.weight": torch.zeros(1)}], [1, 1])
    with pytest.raises(ValueError, match="no weights"):
        average([{"0.weight": torch.zeros(1)}], [0])
    with pytest.raises(ValueError, match="no weights"):
        average([], [])
