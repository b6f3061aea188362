"""Fixed kernels: equal weights whatever instruction set torch would have chosen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from testbed.common.errors import InputError
from testbed.ml import kernels
from testbed.scenario.loading import load

SETTINGS = (
    {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"ATEN_CPU_CAPABILITY": "default"},
)
TESTBED = Path(sys.executable).with_name("testbed")


@pytest.mark.parametrize("scenario", ["quickstart", "examples/own"])
def test_reproducible_runs_have_equal_weights_on_two_instruction_sets(
    tmp_path: Path, scenario: str
) -> None:
    weights = []
    # The network of examples/own is a file that imports torch before the command knows that kernels are to be fixed.
    changes = [
        "faults=[]",
        "expect={}",
        "workload.epochs=null",
        "workload.steps=4",
        "workload.reproducible=true",
    ]
    options = [option for change in changes for option in ("--set", change)]
    for number, setting in enumerate(SETTINGS):
        out = tmp_path / str(number)
        command = [
            TESTBED,
            "run",
            scenario,
            "--runtime",
            "simulate",
            *options,
            "--out",
            out,
        ]
        usual = {
            name: value
            for name, value in os.environ.items()
            if name not in kernels.FIXED
        }
        subprocess.run(
            command, env={**usual, **setting}, check=True, capture_output=True
        )
        weights.append((out / "weights.safetensors").read_bytes())
        (computed_on,) = json.loads((out / "manifest.json").read_text())["host"][
            "computing"
        ]
        assert computed_on["instruction_set"] == "DEFAULT"
        assert computed_on["torch"] == torch.__version__
    assert weights[0] == weights[1]


def test_conflicting_environment_is_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    with pytest.raises(
        InputError, match="ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE"
    ):
        kernels.fix()


def test_libraries_that_compile_for_the_processor_are_off_inside_and_on_again_after() -> (
    None
):
    with kernels.fixed_kernels(reproducible=True):
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled


def test_own_programs_fix_their_kernels_themselves() -> None:
    with pytest.raises(InputError, match="environment"):
        load("examples/programs", ["workload.reproducible=true"])
