"""Runs with weights from a file, and what is said of input that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from click.testing import CliRunner

import testbed
from testbed_controller.cli.main import testbed as cli
from testbed_generation.architecture import preset
from testbed_generation.weights import Seeded, read_all

SCENARIO: dict[str, Any] = {
    "name": "files",
    "devices": {"pi": {"count": 3, "profile": "raspberry-pi-4b"}},
    "network": {"topology": "mesh", "link": {"rate": "100mbit", "delay": "1ms"}},
    "workload": {
        "task": "generate",
        "model": {"preset": "tinystories-260k"},
        "prompts": {"count": 1, "length": 8},
        "tokens": 6,
        "method": {"name": "sequential", "partition": "even"},
    },
}


TINY = "tinystories-260k"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a scenario file, with the weights of seed 7 beside it."""
    architecture = preset(TINY)
    safetensors.torch.save_file(
        read_all(Seeded(architecture, 7), architecture), tmp_path / "model.safetensors"
    )
    scenario = tmp_path / "files.yaml"
    scenario.write_text(json.dumps(SCENARIO))
    return scenario


def texts(file: Path, changes: dict[str, Any]) -> list[int]:
    """Return the generated tokens of a simulated run."""
    run = testbed.simulate(
        testbed.load(file, changes), out=file.parent / f"results-{len(changes)}"
    ).run
    return [
        event.fields["token"] for event in run.outcome.events if event.event == "token"
    ]


@pytest.mark.parametrize("method", ["sequential", "tensor-parallel", "petals"])
def test_weights_of_a_file_give_the_texts_of_equal_weights_from_the_seed(
    file: Path, method: str
) -> None:
    same = {"seed": 7, "workload.method": {"name": method}}
    tokens = texts(file, same)
    assert len(tokens) == 6
    assert (
        texts(file, {"workload.model.weights": "model.safetensors", **same}) == tokens
    )


@pytest.mark.parametrize("recovery", ["restart", "replicate", "replay"])
def test_a_device_that_replaces_another_gets_weights_of_the_file(
    file: Path, recovery: str
) -> None:
    method = {
        "name": "petals" if recovery == "replay" else "sequential",
        "partition": "even",
        "recovery": recovery,
    }
    same = {"seed": 7, "workload.method": method}
    kill = {"kill": "pi2", "when": {"device": "pi2", "begins": "decode", "micro": 10}}
    given = {"workload.model.weights": "model.safetensors", "faults": [kill]}
    assert texts(file, {**given, **same}) == texts(file, same)


def generate(file: Path, changes: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    run = testbed.simulate(testbed.load(file, changes)).run
    return [
        event.fields["token"] for event in run.outcome.events if event.event == "token"
    ], run.metrics


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("draft", [{}, {"layers": 3}, {"width": 32}])
def test_a_draft_changes_no_text(
    file: Path, temperature: float, draft: dict[str, Any]
) -> None:
    same = {"workload.tokens": 30, "workload.sampling.temperature": temperature}
    tokens, _ = generate(file, same)
    drafted, metrics = generate(
        file, {**same, "workload.draft": {"preset": TINY, **draft}}
    )
    assert drafted == tokens
    assert (metrics["draft_accepted"] == 1.0) == (draft == {})


def test_a_draft_that_is_right_saves_time(file: Path) -> None:
    _, alone = generate(file, {"workload.tokens": 30})
    _, drafted = generate(
        file, {"workload.tokens": 30, "workload.draft": {"preset": TINY}}
    )
    assert drafted["duration"] < 0.4 * alone["duration"]


def test_a_draft_survives_the_loss_of_a_stage(file: Path) -> None:
    same = {"workload.tokens": 30, "workload.draft": {"preset": TINY, "layers": 3}}
    kill = {"kill": "pi2", "when": {"device": "pi1", "event": "token", "micro": 12}}
    tokens, metrics = generate(file, {**same, "faults": [kill]})
    assert tokens == generate(file, {"workload.tokens": 30})[0]
    assert metrics["recoveries"] == 1
    assert 0 < metrics["draft_accepted"] < 1


PROBLEMS = {
    "draft": (
        {"workload.draft": {"preset": "smollm2-135m"}},
        "workload.draft.vocabulary: the draft has a vocabulary of 49152 tokens, the model of 512",
    ),
    "draft of another method": (
        {"workload.draft": {"preset": TINY}, "workload.method": {"name": "petals"}},
        "workload.draft: tokens are generated one by one here: leave it out",
    ),
    "context": (
        {"workload.tokens": 600},
        "workload.tokens: a prompt and its 600 tokens are 608 tokens, the model's context is 512: generate fewer",
    ),
    "heads": (
        {"workload.model.kv_heads": 3},
        "workload.model.kv_heads: 8 heads do not divide over 3 key-value heads: give a number that divides them",
    ),
    "width": (
        {"workload.model.heads": 12, "workload.model.kv_heads": 4},
        "workload.model.width: a width of 64 does not divide over 12 heads",
    ),
    "shards": (
        {"workload.method": {"name": "tensor-parallel"}, "devices.pi.count": 5},
        "4 key-value heads do not divide over 5 devices: use at most 4 devices",
    ),
    "rows": (
        {"workload.method": {"name": "tensor-parallel", "dataflow": "gather"}},
        "workload.method.dataflow: 64 query rows do not divide over 3 devices",
    ),
    "tokenizer": (
        {"workload.model.weights": "model.safetensors", "workload.prompts": ["Once"]},
        "tokenizer.json: no such file: put the model's tokenizer.json beside its weights",
    ),
    "weights": (
        {"workload.model.weights": "nothing.safetensors"},
        "nothing.safetensors: no such file",
    ),
    "shapes": (
        {"workload.model.weights": "model.safetensors", "workload.model.width": 128},
        "workload.model.weights: model.embed_tokens.weight has the shape 512 x 64, the model needs 512 x 128",
    ),
    "memory": (
        {"workload.model": {"preset": "llama-3-70b"}, "workload.numerics": "none"},
        "pi1 has room for 0 of 27 layers: add memory or devices, shorten the sequences",
    ),
    "memory of shards": (
        {
            "workload.model": {"preset": "llama-3-70b"},
            "workload.numerics": "none",
            "workload.method": {"name": "tensor-parallel"},
        },
        "devices: pi1 needs",
    ),
    "preset": (
        {"workload.model.preset": "llama-9"},
        "workload.model.preset: unknown preset 'llama-9'",
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_bad_input_is_refused_in_a_line_with_key_and_remedy(
    file: Path, problem: str
) -> None:
    changes, text = PROBLEMS[problem]
    overrides = []
    for key, value in changes.items():
        overrides += ["--set", f"{key}={json.dumps(value)}"]
    done = CliRunner().invoke(cli, ["validate", str(file), *overrides])
    assert done.exit_code != 0
    assert text in done.output
    assert len(done.output.splitlines()) == 1
