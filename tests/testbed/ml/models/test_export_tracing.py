"""Tracing of networks by `torch.export`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from testbed.ml.fields import InputSpec
from testbed.ml.models import export_tracing


class Wrapping(nn.Module):
    """A network with a normalisation named `network`, the exporter's name of the whole network."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.network(samples))
        return result


def called_modules(graph: torch.fx.Graph) -> list[object]:
    """Return the names of the modules in a graph, in the order of calls."""
    return [node.target for node in graph.nodes if node.op == "call_module"]


def test_submodule_named_network_updates_running_statistics() -> None:
    root = Wrapping().train()
    traced = export_tracing._export_network(root, InputSpec((8,)))
    assert called_modules(traced.graph) == ["network"]
    running_mean = root.network.running_mean
    assert running_mean is not None
    before = running_mean.clone()
    # A normalisation updates its statistics in place; samples have a mean of 3.
    torch.fx.GraphModule(root, traced.graph)(torch.randn(16, 8) + 3)
    assert not torch.equal(running_mean, before)


class NormScale(nn.Module):
    """A user's module: a normalisation with own running statistics, then a factor."""

    mean: torch.Tensor
    variance: torch.Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("variance", torch.ones(features))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        normalised = functional.batch_norm(
            samples, self.mean, self.variance, training=self.training
        )
        return normalised * 3


class ScaledBatchNorm(nn.BatchNorm1d):
    """A user's subclass of torch's normalisation, with a factor."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name of the base class
        normalised: torch.Tensor = super().forward(input)
        return normalised * 3


@pytest.mark.parametrize("normalisation", [NormScale, ScaledBatchNorm])
def test_module_that_contains_normalisation_is_expanded(
    normalisation: Callable[[int], nn.Module],
) -> None:
    root = nn.Sequential(normalisation(8), nn.Linear(8, 4), nn.BatchNorm1d(4))
    traced = export_tracing._export_network(root, InputSpec((8,)))
    # Only torch's own normalisation remains a module; the other one would lose its scale.
    assert called_modules(traced.graph) == ["2"]


def test_tracing_keeps_running_statistics() -> None:
    root = nn.Sequential(NormScale(8), nn.Linear(8, 4), nn.BatchNorm1d(4))
    before = {name: buffer.clone() for name, buffer in root.named_buffers()}
    export_tracing._export_network(root, InputSpec((8,)))
    for name, buffer in root.named_buffers():
        assert torch.equal(buffer, before[name]), name


class Masked(nn.Module):
    """A network with a buffer of three rows in the memory of one."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1, 8).expand(3, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(samples * self.mask.sum(0))
        return result


def test_buffer_with_overlapping_memory_is_exported() -> None:
    # torch cannot write in place into a tensor of which elements share memory.
    traced = export_tracing._export_network(Masked(), InputSpec((8,)))
    assert len(traced.measures) == 2
