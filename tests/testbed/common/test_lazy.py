from __future__ import annotations

import subprocess
import sys

from testbed.common.lazy import functional, nn, torch


def test_torch_is_imported_by_its_first_use_alone() -> None:
    program = (
        "import sys; from testbed.common.lazy import nn, torch\n"
        "early = 'torch' in sys.modules\n"
        "assert torch.zeros(2).shape == (2,) and nn.Linear\n"
        "sys.exit(early or 'torch' not in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_what_is_asked_for_is_torch_s_own() -> None:
    import torch as real

    assert torch.Tensor is real.Tensor
    assert nn.Linear is real.nn.Linear
    assert functional.relu is real.nn.functional.relu


def test_planning_imports_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; from controller.cli.main import main\n"
        "sys.argv = ['testbed', 'plan', 'quickstart']\n"
        "try: main()\n"
        "finally: print(sorted({'numpy', 'torch', 'scipy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stderr == "[]\n", done.stderr
