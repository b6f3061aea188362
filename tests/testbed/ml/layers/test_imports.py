"""What training on a device does not import, since it takes a second and tens of megabytes on each of them."""

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

def imported():
    return [name for name in sys.modules if name in ("torch._dynamo", "sympy") or "symbolic_shapes" in name]

model = chain("m", (4,), 3, [("a", [Linear(3), ReLU()])])
layer = graph_of(model).layers[0]
state = draw_tensors(model, [(layer, layer.whole)], 1)
shard = LayerShard(layer, layer.whole, state, OptimizerPart(learning_rate=0.1))
shard.forward(0, torch.ones(2, 4))
shard.backward(0, torch.ones(2, 3))
shard.update()
part_of_a_layer = imported()
shard = Shard(create("mlp", {}, (1, 8, 8), 10), 0, 2, 1, sgd_config(momentum=0.9))
outputs = shard.forward("k", torch.zeros(2, 1, 8, 8))
shard.backward("k", torch.ones_like(outputs))
shard.update(0)
print(json.dumps([part_of_a_layer, imported()]))
"""


@pytest.fixture(scope="module")
def imported() -> list[list[str]]:
    """Return what was imported of it in one process: once a part of a layer was trained, and then whole layers too."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    found: list[list[str]] = json.loads(done.stdout)
    return found


def test_a_part_of_a_layer_imports_no_symbolic_shapes(
    imported: list[list[str]],
) -> None:
    assert not [
        name for name in imported[0] if name == "sympy" or "symbolic_shapes" in name
    ]


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="older torch imports them itself"
)
def test_a_shard_imports_neither_torchs_compiler_nor_sympy(
    imported: list[list[str]],
) -> None:
    assert not {"torch._dynamo", "sympy"} & set(imported[1])
