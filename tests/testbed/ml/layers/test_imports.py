"""Modules that training on a device does not import, since they cost seconds and tens of megabytes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import json, sys
import torch
from testbed.ml.layers.layer_shard import LayerShard
from testbed.ml.layers.shard import Shard
from testbed.ml.models import create
from testbed.ml.models.chain import chain
from testbed.ml.models.graph import graph_of
from testbed.ml.models.layers import Linear, ReLU
from testbed.ml.models.sliced import draw_tensors
from testbed.ml.training.schema import OptimizerPart
from tests.helpers.training import sgd_config

def expensive_imports():
    return [name for name in sys.modules if name in ("torch._dynamo", "sympy") or "symbolic_shapes" in name]

model = chain("m", (4,), 3, [("a", [Linear(3), ReLU()])])
layer = graph_of(model).layers[0]
state = draw_tensors(model, [(layer, layer.whole_slice)], 1)
shard = LayerShard(layer, layer.whole_slice, state, OptimizerPart(learning_rate=0.1))
shard.forward(0, torch.ones(2, 4))
shard.backward(0, torch.ones(2, 3))
shard.update()
by_layer_shard = expensive_imports()
shard = Shard(create("mlp", {}, (1, 8, 8), 10), 0, 2, 1, sgd_config(momentum=0.9))
outputs = shard.forward("k", torch.zeros(2, 1, 8, 8))
shard.backward("k", torch.ones_like(outputs))
shard.update(0)
print(json.dumps({"layer shard": by_layer_shard, "shard": expensive_imports()}))
"""


@pytest.fixture(scope="module")
def imports() -> dict[str, list[str]]:
    """The expensive modules in a new process after training a part of a layer, and then also whole units."""
    # This process has imported them for other tests.
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    names: dict[str, list[str]] = json.loads(process.stdout)
    return names


def test_layer_shard_imports_no_symbolic_shapes(imports: dict[str, list[str]]) -> None:
    for name in imports["layer shard"]:
        assert name != "sympy"
        assert "symbolic_shapes" not in name


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="older torch imports them itself"
)
def test_shard_imports_neither_compiler_of_torch_nor_sympy(
    imports: dict[str, list[str]],
) -> None:
    assert "torch._dynamo" not in imports["shard"]
    assert "sympy" not in imports["shard"]
