"""Our descent against torch's own, to the bit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from testbed.kits.layers.sgd import Sgd
from testbed.workload import OptimizerPart


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 4e-5])
def test_equals_torch_to_the_bit(momentum: float, weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(3)
    settings = OptimizerPart(learning_rate=0.07, momentum=momentum, weight_decay=weight_decay)
    start = torch.randn(17, 5, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    mine = Sgd(settings)
    reference = torch.optim.SGD([theirs], lr=0.07, momentum=momentum, weight_decay=weight_decay, foreach=False)
    for _ in range(20):
        gradient = torch.randn(17, 5, generator=generator)
        theirs.grad = gradient.clone()
        mine.step({"w": ours}, {"w": gradient})
        reference.step()
        assert torch.equal(ours, theirs)


def test_a_shard_imports_neither_torchs_compiler_nor_sympy() -> None:
    code = (
        "import sys; from testbed.models import create; from testbed.kits.layers.shard import Shard;"
        "from testbed.workload import OptimizerPart; import torch;"
        "shard = Shard(create('mlp', {}, (1, 8, 8), 10), 0, 2, 1, OptimizerPart(momentum=0.9));"
        "outputs = shard.forward('k', torch.zeros(2, 1, 8, 8));"
        "shard.backward('k', torch.ones_like(outputs)); shard.update();"
        "sys.exit('torch._dynamo' in sys.modules or 'sympy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
