from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from testbed.ml.lazy import functional, nn, torch
from tests.helpers import ROOT


def test_torch_is_imported_by_its_first_use_alone(tmp_path: Path) -> None:
    # A small one in its place: torch itself takes seconds, and that it is this one is shown below.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("zeros = list\n")
    (tmp_path / "torch" / "nn.py").write_text("Linear = dict\n")
    program = (
        "import sys; from testbed.ml.lazy import nn, torch\n"
        "early = 'torch' in sys.modules\n"
        "assert torch.zeros is list and nn.Linear is dict\n"
        "sys.exit(early or 'torch' not in sys.modules)"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_what_is_asked_for_is_torch_s_own() -> None:
    import torch as real

    assert torch.Tensor is real.Tensor
    assert nn.Linear is real.nn.Linear
    assert functional.relu is real.nn.functional.relu


def test_planning_imports_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; from testbed_controller.cli.main import main\n"
        "sys.argv = ['testbed', 'plan', 'quickstart']\n"
        "try: main()\n"
        "finally: print(sorted({'numpy', 'torch', 'scipy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == "[]\n", done.stderr
