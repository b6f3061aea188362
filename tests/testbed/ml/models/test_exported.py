"""Tracing of networks by `torch.export`."""

from __future__ import annotations

import torch
from torch import nn

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
    module = torch.fx.GraphModule(root, graph)
    module(torch.randn(16, 8) + 3)
    assert not torch.equal(module.network.running_mean, before)
