"""Errors of scenarios are one line with the key and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import testbed
from testbed.common.errors import InputError
from testbed.prepare import prepare
from testbed.scenario.expand import Trial, trials

METHOD = "workload.method"
ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"workload.tokens": 800}, "workload.tokens: .* context is 512: generate fewer"),
    ({"workload.model.kv_heads": 3}, "workload.model.kv_heads: 8 heads do not divide"),
    ({"workload.model.width": 66}, "workload.model.width: .* a multiple of 16"),
    ({"workload.model.preset": "lama"}, "workload.model.preset: unknown preset 'lama'"),
    (
        {"workload.model.weights": "no.safetensors"},
        "no.safetensors: no such file: name",
    ),
    ({"workload.prompts": [""]}, "workload.prompts: prompt 1 is empty: give a text"),
    ({"workload.prompts": []}, "workload: has no prompt: give at least one text"),
    ({"workload.prompts": {"file": "no.txt"}}, "workload.prompts.file: .* name a text"),
    (
        {METHOD: {"name": "petals", "spares": ["pi9"]}},
        "workload.method.spares: unknown device 'pi9': did you mean",
    ),
    (
        {METHOD: {"name": "petals", "spares": ["pi1"]}},
        "workload.method.spares: pi1, the first device, .* name other devices",
    ),
    (
        {METHOD: {"name": "ring", "disk": {"pi9": "1GB/s"}}},
        "workload.method.disk: unknown device 'pi9'",
    ),
    (
        {METHOD: {"name": "tensor-parallel", "shares": [1, 2]}},
        "workload.method.shares: 2 shares for 4 devices: give one for each",
    ),
    (
        {METHOD: {"name": "tensor-parallel"}, "devices.pi.count": 6},
        "4 key-value heads do not divide over 6 devices: use at most 4",
    ),
    (
        {"workload.model.preset": "llama-3-70b", "workload.numerics": "none"},
        "workload.method: pi1 has room for 0 of 27 layers: add memory or devices",
    ),
]


def load_trial(changes: dict[str, Any]) -> Trial:
    [trial] = trials(testbed.load("generation/kill", changes))
    return trial


@pytest.mark.parametrize(("changes", "message"), ERRORS)
def test_error_is_one_line_with_key_and_remedy(
    changes: dict[str, Any], message: str
) -> None:
    # The fault and the expectations of the scenario belong to its own number of devices.
    changes = {"faults": [], "expect": {}, **changes}
    with pytest.raises(InputError, match=message) as raised:
        prepare(load_trial(changes))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "index",
    [
        "no JSON",
        "{}",
        '{"weight_map": {"model.embed_tokens.weight": "missing.safetensors"}}',
    ],
    ids=["not-json", "without-map", "missing-file"],
)
def test_folder_with_broken_index_of_weights_is_refused(
    tmp_path: Path, index: str
) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    changes = {"workload.model.weights": str(tmp_path)}
    with pytest.raises(InputError, match=r"no weights can be read .* download"):
        prepare(load_trial(changes))


@pytest.mark.parametrize("name", ["broken.safetensors", "broken.gguf"])
def test_broken_file_of_weights_is_refused(tmp_path: Path, name: str) -> None:
    if name.endswith("gguf"):
        pytest.importorskip("gguf")
    (tmp_path / name).write_bytes(b"no weights at all")
    changes = {"workload.model.weights": str(tmp_path / name)}
    with pytest.raises(InputError, match=r"no weights can be read .* download"):
        prepare(load_trial(changes))
