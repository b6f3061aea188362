"""Modules of which models are built, against what they do written out."""

from __future__ import annotations

import torch
from torch import nn

from testbed.ml.models.modules import ChannelMean, Joined, Segment, SplitInputs, Sum


class Plus(nn.Module):
    """Adds a number to what enters, or to the sum of all that enters."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(float(number)))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return sum(inputs) + self.number


def test_a_sum_feeds_each_child_the_same() -> None:
    assert Sum(Plus(1), Plus(10), Plus(100))(torch.tensor([2.0])).tolist() == [117.0]
    assert Sum(Plus(1))(torch.tensor([2.0])).tolist() == [3.0]


def test_channels_are_joined_in_the_order_of_the_inputs() -> None:
    one, two = torch.zeros(2, 1, 3), torch.ones(2, 2, 3)
    assert Joined()(one, two)[0, :, 0].tolist() == [0, 1, 1]
    assert Joined(Plus(5))(two, one)[1, :, 2].tolist() == [6, 6, 5]


def test_the_mean_of_a_channel_is_that_of_its_pixels() -> None:
    image = torch.arange(12.0).reshape(1, 2, 2, 3)
    assert ChannelMean()(image).tolist() == [[2.5, 8.5]]


def test_unit_with_several_inputs_gets_them_on_one_axis_and_keeps_its_names() -> None:
    apart = SplitInputs(Plus(1), [(2, 2), (4,), (1, 4)])
    values = torch.arange(24.0).reshape(2, 12)

    class Flat(Plus):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            assert [tuple(each.shape) for each in inputs] == [
                (2, 2, 2),
                (2, 4),
                (2, 1, 4),
            ]
            return super().forward(*(each.flatten(1) for each in inputs))

    found = SplitInputs(Flat(1), [(2, 2), (4,), (1, 4)])(values)
    assert found[0].tolist() == [
        0 + 4 + 8 + 1,
        1 + 5 + 9 + 1,
        2 + 6 + 10 + 1,
        3 + 7 + 11 + 1,
    ]
    apart.load_state_dict({"number": torch.tensor(7.0)})
    assert apart.unit.number.item() == 7.0


def segment(first: int, last: int) -> Segment:
    """Units 0 to 3, of which the last reads units 0 and 2 beside each other; unit 1 is read by 2 alone."""
    units = [Plus(1), Plus(10), Plus(100), Plus(1000)]
    reads = [[-1], [0], [1], [0, 2]]
    shape = (1, 2)
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


def test_units_read_their_sources_and_parts_compose_to_the_whole() -> None:
    inputs = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    whole = segment(0, 4)(inputs)
    # x + 1, then + 10 and + 100, and the sum of the first and that, + 1000.
    assert whole.tolist() == (2 * inputs + 1112).tolist()
    for cut in (1, 2, 3):
        passing = segment(0, cut)(inputs)
        assert torch.equal(segment(cut, 4)(passing), whole)
    assert segment(0, 2)(inputs).shape == (2, 4), "two tensors cross, flat and joined"


def test_units_keep_their_numbers_and_are_announced_before_they_run() -> None:
    seen: list[str] = []
    part = segment(1, 3)
    part(torch.zeros(1, 1, 2), seen.append)
    assert seen == ["1", "2"]
    assert [*part.state_dict()] == ["1.number", "2.number"]
