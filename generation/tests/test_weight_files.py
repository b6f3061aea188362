"""Runs with weights from a file or with a draft model, and error messages for wrong input."""

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
from testbed_generation.weights import SeededWeights, read_weights

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
SEED = 7
"""Seed of the weights in the file, and of runs without a file."""


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    """Return a scenario file with a file of weights beside it."""
    architecture = preset(TINY)
    weights = read_weights(SeededWeights(architecture, SEED), architecture)
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    path = tmp_path / "files.yaml"
    path.write_text(json.dumps(SCENARIO))
    return path


def generate(
    scenario_file: Path, changes: dict[str, Any]
) -> tuple[list[int], dict[str, Any]]:
    """Return the generated tokens and the metrics of a simulated run."""
    run = testbed.simulate(testbed.load(scenario_file, changes)).run
    tokens = []
    for event in run.outcome.events:
        if event.event == "token":
            tokens.append(event.fields["token"])
    return tokens, run.metrics


@pytest.mark.parametrize("method", ["sequential", "tensor-parallel", "petals"])
def test_weights_from_file_generate_texts_of_same_weights_from_seed(
    scenario_file: Path, method: str
) -> None:
    changes = {"seed": SEED, "workload.method": {"name": method}}
    tokens, _ = generate(scenario_file, changes)
    assert len(tokens) == 6
    file_changes = {"workload.model.weights": "model.safetensors", **changes}
    file_tokens, _ = generate(scenario_file, file_changes)
    assert file_tokens == tokens


@pytest.mark.parametrize("recovery", ["restart", "replicate", "replay"])
def test_replacement_of_lost_stage_receives_weights_from_file(
    scenario_file: Path, recovery: str
) -> None:
    method = {
        "name": "petals" if recovery == "replay" else "sequential",
        "partition": "even",
        "recovery": recovery,
    }
    changes = {"seed": SEED, "workload.method": method}
    expected, _ = generate(scenario_file, changes)
    # During the third pass after that of the prompt of 8 tokens, which ends with the token at position 10.
    kill = {"kill": "pi2", "when": {"device": "pi2", "begins": "decode", "micro": 10}}
    file_changes = {"workload.model.weights": "model.safetensors", "faults": [kill]}
    tokens, _ = generate(scenario_file, {**file_changes, **changes})
    assert tokens == expected


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize(
    "draft",
    [{}, {"layers": 3}, {"width": 32}],
    ids=["same-model", "fewer-layers", "smaller-width"],
)
def test_draft_does_not_change_text(
    scenario_file: Path, temperature: float, draft: dict[str, Any]
) -> None:
    changes = {"workload.tokens": 30, "workload.sampling.temperature": temperature}
    expected, _ = generate(scenario_file, changes)
    draft_changes = {**changes, "workload.draft": {"preset": TINY, **draft}}
    tokens, metrics = generate(scenario_file, draft_changes)
    assert tokens == expected
    # Only a draft that equals the model proposes nothing but its tokens.
    is_same_model = not draft
    assert (metrics["draft_accepted"] == 1.0) == is_same_model


def test_accepted_draft_saves_time(scenario_file: Path) -> None:
    changes = {"workload.tokens": 30}
    _, without_draft = generate(scenario_file, changes)
    draft_changes = {**changes, "workload.draft": {"preset": TINY}}
    _, with_draft = generate(scenario_file, draft_changes)
    # A pass of the stages generates 5 tokens instead of one: 4 accepted drafts, and one more token. The draft model
    # equals the model here, but computes on one device without messages.
    assert with_draft["duration"] < 0.4 * without_draft["duration"]


def test_text_with_draft_does_not_change_if_stage_is_lost(scenario_file: Path) -> None:
    changes = {"workload.tokens": 30}
    expected, _ = generate(scenario_file, changes)
    kill = {"kill": "pi2", "when": {"device": "pi1", "event": "token", "micro": 12}}
    draft = {"preset": TINY, "layers": 3}
    tokens, metrics = generate(
        scenario_file, {**changes, "workload.draft": draft, "faults": [kill]}
    )
    assert tokens == expected
    assert metrics["recoveries"] == 1
    assert 0 < metrics["draft_accepted"] < 1


INVALID_INPUT = {
    "draft": (
        {"workload.draft": {"preset": "smollm2-135m"}},
        "workload.draft.vocabulary: the draft has a vocabulary of 49152 tokens, the model of 512",
    ),
    "draft of another method": (
        {"workload.draft": {"preset": TINY}, "workload.method": {"name": "petals"}},
        "workload.draft: this method generates one token at a time: leave 'draft' out",
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


@pytest.mark.parametrize("name", INVALID_INPUT)
def test_invalid_input_is_refused_on_one_line_with_key_and_remedy(
    scenario_file: Path, name: str
) -> None:
    changes, message = INVALID_INPUT[name]
    overrides = []
    for key, value in changes.items():
        overrides += ["--set", f"{key}={json.dumps(value)}"]
    result = CliRunner().invoke(cli, ["validate", str(scenario_file), *overrides])
    assert result.exit_code != 0
    assert message in result.output
    assert len(result.output.splitlines()) == 1
