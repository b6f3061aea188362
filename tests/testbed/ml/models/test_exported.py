"""Tracing of networks by `torch.export`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from testbed.ml.fields import InputSpec
from testbed.ml.models import exported


class Wrapping(nn.Module):
    """A network whose only normalisation is a submodule with the name that the exporter gives the whole network."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.network(samples))
        return result


def test_submodule_called_network_keeps_its_running_statistics() -> None:
    root = Wrapping().train()
    graph = exported._export_network(root, InputSpec((8,))).graph
    modules = [node.target for node in graph.nodes if node.op == "call_module"]
    assert modules == ["network"]
    before = root.network.running_mean
    assert before is not None
    before = before.clone()
    torch.fx.GraphModule(root, graph)(torch.randn(16, 8) + 3)
    after = root.network.running_mean
    assert after is not None
    assert not torch.equal(after, before)


class NormScale(nn.Module):
    """A user's module with statistics of its own, and more operations than the normalisation."""

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
    """A user's normalisation that continues where torch's ends."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name of the base class
        normalised: torch.Tensor = super().forward(input)
        return normalised * 3


@pytest.mark.parametrize("make", [NormScale, ScaledBatchNorm])
def test_modules_around_a_normalisation_are_exported(
    make: Callable[[int], nn.Module],
) -> None:
    root = nn.Sequential(make(8), nn.Linear(8, 4), nn.BatchNorm1d(4))
    traced = exported._export_network(root, InputSpec((8,)))
    modules = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert modules == ["2"]


def test_tracing_leaves_running_statistics_as_they_were() -> None:
    root = nn.Sequential(NormScale(8), nn.Linear(8, 4), nn.BatchNorm1d(4))
    before = {name: buffer.clone() for name, buffer in root.named_buffers()}
    exported._export_network(root, InputSpec((8,)))
    for name, buffer in root.named_buffers():
        assert torch.equal(buffer, before[name]), name


class Masked(nn.Module):
    """A network with a buffer whose rows share their memory."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1, 8).expand(3, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(samples * self.mask.sum(0))
        return result


def test_buffers_whose_elements_share_memory_are_exported() -> None:
    traced = exported._export_network(Masked(), InputSpec((8,)))
    assert len(traced.runs) == 2
