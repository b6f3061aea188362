"""Lazy imports of torch and numpy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from testbed.ml.lazy import functional, nn, torch
from tests.helpers import ROOT


def run_python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process, since the process of the tests has imported torch already."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_torch_is_imported_at_first_use(tmp_path: Path) -> None:
    # A stand-in for torch, whose import takes seconds; another test covers the real package.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("zeros = list\n")
    (tmp_path / "torch" / "nn.py").write_text("Linear = dict\n")
    program = (
        "import sys; from testbed.ml.lazy import nn, torch\n"
        "early = 'torch' in sys.modules\n"
        "assert torch.zeros is list and nn.Linear is dict\n"
        "sys.exit(early or 'torch' not in sys.modules)"
    )
    # Python searches the first folder first.
    search_path = os.pathsep.join([str(tmp_path), str(ROOT)])
    process = run_python(program, PYTHONPATH=search_path)
    assert process.returncode == 0, process.stderr


def test_lazy_modules_have_attributes_of_torch() -> None:
    import torch as real_torch

    assert torch.Tensor is real_torch.Tensor
    assert nn.Linear is real_torch.nn.Linear
    assert functional.relu is real_torch.nn.functional.relu


def test_plan_command_imports_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; from testbed_controller.cli.main import main\n"
        "sys.argv = ['testbed', 'plan', 'quickstart']\n"
        "try: main()\n"
        "finally: print(sorted({'numpy', 'torch', 'scipy'} & set(sys.modules)), file=sys.stderr)"
    )
    assert run_python(program).stderr == "[]\n"
