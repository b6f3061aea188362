"""Modules that connect layers: sums, joins, and segments of units."""

from __future__ import annotations

import torch
from torch import nn

from testbed.ml.models.modules import ChannelMean, Joined, Segment, SplitInputs, Sum


class Plus(nn.Module):
    """Adds a number to the sum of all inputs."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(float(number)))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return sum(inputs) + self.number


class FlatPlus(Plus):
    """Adds a number to the sum of three inputs of different shapes, flattened."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        shapes = [tuple(tensor.shape) for tensor in inputs]
        assert shapes == [(2, 2, 2), (2, 4), (2, 1, 4)]
        return super().forward(*(tensor.flatten(1) for tensor in inputs))


def test_sum_feeds_same_input_to_each_child() -> None:
    value = torch.tensor([2.0])
    # (2 + 1) + (2 + 10) + (2 + 100)
    assert Sum(Plus(1), Plus(10), Plus(100))(value).tolist() == [117.0]
    assert Sum(Plus(1))(value).tolist() == [3.0]


def test_channels_are_joined_in_order_of_inputs() -> None:
    zeros = torch.zeros(2, 1, 3)
    ones = torch.ones(2, 2, 3)
    assert Joined()(zeros, ones)[0, :, 0].tolist() == [0, 1, 1]
    assert Joined(Plus(5))(ones, zeros)[1, :, 2].tolist() == [6, 6, 5]


def test_channel_mean_averages_pixels() -> None:
    image = torch.arange(12.0).reshape(1, 2, 2, 3)
    # The channels hold 0 to 5 and 6 to 11.
    assert ChannelMean()(image).tolist() == [[2.5, 8.5]]


def test_split_inputs_restores_shapes_of_joined_inputs() -> None:
    values = torch.arange(24.0).reshape(2, 12)
    outputs = SplitInputs(FlatPlus(1), [(2, 2), (4,), (1, 4)])(values)
    # The first row holds 0 to 11, four values for each input.
    assert outputs[0].tolist() == [
        0 + 4 + 8 + 1,
        1 + 5 + 9 + 1,
        2 + 6 + 10 + 1,
        3 + 7 + 11 + 1,
    ]


def test_split_inputs_keeps_parameter_names_of_unit() -> None:
    module = SplitInputs(Plus(1), [(2, 2), (4,), (1, 4)])
    module.load_state_dict({"number": torch.tensor(7.0)})
    assert module.unit.number.item() == 7.0


def make_segment(first: int, last: int) -> Segment:
    """Return units ``first`` to ``last`` of four, where the last unit reads units 0 and 2, joined."""
    units = [Plus(1), Plus(10), Plus(100), Plus(1000)]
    reads = [[-1], [0], [1], [0, 2]]
    shape = (1, 2)
    # The tensors that cross each cut: the output of unit 0 waits for unit 3.
    crossing = [
        [(-1, shape)],
        [(0, shape)],
        [(0, shape), (1, shape)],
        [(0, shape), (2, shape)],
        [(3, shape)],
    ]
    return Segment(
        first, units[first:last], reads[first:last], crossing[first : last + 1]
    )


def test_segments_compose_to_whole_at_every_cut() -> None:
    inputs = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    expected = make_segment(0, 4)(inputs)
    # Unit 0 has x + 1, unit 2 x + 111, and unit 3 adds 1000 to their sum.
    assert expected.tolist() == (2 * inputs + 1112).tolist()
    for cut in (1, 2, 3):
        crossing = make_segment(0, cut)(inputs)
        assert torch.equal(make_segment(cut, 4)(crossing), expected)


def test_tensors_crossing_a_cut_are_flattened_and_joined() -> None:
    inputs = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    # Two tensors of (1, 2) cross the cut after unit 1.
    assert make_segment(0, 2)(inputs).shape == (2, 4)


def test_segment_announces_units_before_running_them() -> None:
    announced: list[str] = []
    segment = make_segment(1, 3)
    segment(torch.zeros(1, 1, 2), announced.append)
    assert announced == ["1", "2"]
    assert [*segment.state_dict()] == ["1.number", "2.number"]
