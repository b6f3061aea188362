"""Channels of slices: ranges, elements, and selection from tensors."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from testbed.ml.models.slices import as_channels, elements_of, pick

NUMBERS = st.sets(st.integers(0, 20))


@given(NUMBERS, st.integers(1, 4))
def test_elements_of_channels_are_in_ascending_order(
    numbers: set[int], pixels: int
) -> None:
    channels = as_channels(numbers)
    ascending = sorted(numbers)
    assert list(channels) == ascending
    expected = []
    for channel in ascending:
        first = channel * pixels
        expected.extend(range(first, first + pixels))
    assert list(elements_of(channels, pixels)) == expected


@given(NUMBERS)
def test_pick_selects_channels_of_tensor(numbers: set[int]) -> None:
    channels = as_channels(numbers)
    values = torch.arange(100)
    assert pick(values, 0, channels).tolist() == sorted(numbers)


@given(st.integers(0, 20), st.integers(1, 20))
def test_pick_of_range_shares_memory_of_tensor(start: int, count: int) -> None:
    channels = as_channels(set(range(start, start + count)))
    assert isinstance(channels, range)
    values = torch.arange(100)
    # A range is a view of the tensor; a tuple of channels is copied.
    expected = values[start:].data_ptr()
    assert pick(values, 0, channels).data_ptr() == expected


@given(NUMBERS)
def test_pick_translates_channel_numbers_to_positions(numbers: set[int]) -> None:
    channels = as_channels(numbers)
    # The tensor has a value for each of these channels, and all but the first are selected.
    values = torch.arange(len(channels))
    selected = pick(values, 0, channels[1:], channels)
    assert selected.tolist() == list(range(1, len(channels)))
