"""Federated averaging (McMahan et al., 2017), equation (3) of PipeLearn: each model by its share of the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from testbed.common.lazy import torch


def average(states: Sequence[Mapping[str, torch.Tensor]], samples: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the mean of several models' states, weighted by samples, in the order given.

    Running statistics of batch normalisation are averaged as the weights are. Of whole numbers (how many batches those
    have seen) the largest is taken. Momentum is not in a state: it stays where it was made. Raises ValueError for
    states of different names and for no samples at all.
    """
    if states and all(tensor.is_meta for tensor in states[0].values()):
        return dict(states[0])  # no numbers, no mean
    names = list(states[0]) if states else []
    if any(list(state) != names for state in states):
        raise ValueError("states of different layers have no mean")
    if sum(samples) <= 0 or len(samples) != len(states):
        raise ValueError(f"no weights in {list(samples)} samples for {len(states)} states")
    shares = [count / sum(samples) for count in samples]
    found = {}
    for name in names:
        tensors = [state[name] for state in states]
        if tensors[0].is_floating_point():
            mean = tensors[0] * shares[0]
            for tensor, share in zip(tensors[1:], shares[1:], strict=True):
                mean = mean.add(tensor, alpha=share)
        else:
            mean = torch.stack(tensors).amax(0)
        found[name] = mean
    return found
