"""Fixed kernels, which make weights independent of the instruction set of the processor."""

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

INSTRUCTION_SETS = (
    {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"ATEN_CPU_CAPABILITY": "default"},
)
"""Environments in which torch and oneDNN choose different instruction sets."""
TESTBED = Path(sys.executable).with_name("testbed")
CHANGES = (
    "faults=[]",
    "expect={}",
    "workload.epochs=null",
    "workload.steps=4",
    "workload.reproducible=true",
)


def simulate_reproducibly(
    scenario: str, environment: dict[str, str], results: Path
) -> None:
    """Simulate four steps of a scenario in a new process, and write the results to a folder."""
    command = [TESTBED, "run", scenario, "--runtime", "simulate", "--out", results]
    for change in CHANGES:
        command += ["--set", change]
    # The settings of fixed kernels may be set for the tests themselves.
    usual = {}
    for name, value in os.environ.items():
        if name not in kernels.FIXED:
            usual[name] = value
    subprocess.run(
        command, env={**usual, **environment}, check=True, capture_output=True
    )


# The model file of examples/own imports torch before the command has read that kernels must be fixed.
@pytest.mark.parametrize("scenario", ["quickstart", "examples/own"])
def test_reproducible_run_has_equal_weights_on_two_instruction_sets(
    tmp_path: Path, scenario: str
) -> None:
    weights = []
    for number, environment in enumerate(INSTRUCTION_SETS):
        results = tmp_path / str(number)
        simulate_reproducibly(scenario, environment, results)
        weights.append((results / "weights.safetensors").read_bytes())
        manifest = json.loads((results / "manifest.json").read_text())
        (processor,) = manifest["host"]["computing"]
        assert processor["instruction_set"] == "DEFAULT"
        assert processor["torch"] == torch.__version__
    assert weights[0] == weights[1]


def test_conflicting_environment_is_refused_with_required_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    with pytest.raises(
        InputError, match="ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE"
    ):
        kernels.fix()


def test_onednn_is_disabled_only_while_kernels_are_fixed() -> None:
    # oneDNN compiles its kernels for the processor at hand.
    with kernels.fixed_kernels(reproducible=True):
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled


def test_reproducible_is_refused_for_external_programs() -> None:
    # The testbed does not start these programs and cannot set their environment.
    with pytest.raises(InputError, match="environment"):
        load("examples/programs", ["workload.reproducible=true"])
