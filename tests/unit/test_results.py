from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import recorded
from ruamel.yaml import YAML

from controller.results import files
from controller.results.run import run_name
from testbed.errors import InputError
from testbed.scenario.schema import Scenario
from testbed.trace.events import Event


def test_a_run_leaves_every_file(tmp_path: Path) -> None:
    place = files.write(tmp_path / "run", recorded.trial(), recorded.plan(), recorded.outcome())
    assert place == tmp_path / "run"
    assert {path.name for path in place.iterdir()} >= {
        "scenario.yaml",
        "plan.json",
        "manifest.json",
        "events.jsonl",
        "metrics.json",
        "fidelity.json",
        "trace.json",
    }
    assert json.loads((place / "metrics.json").read_text())["accuracy"] == 0.95
    assert json.loads((place / "fidelity.json").read_text())["verdict"]["kind"] == "trusted"
    lines = (place / "events.jsonl").read_text().splitlines()
    assert [Event.from_json(line) for line in lines] == recorded.events()


def test_the_resolved_scenario_loads_back_equal(tmp_path: Path) -> None:
    place = files.write(tmp_path / "run", recorded.trial(), recorded.plan(), recorded.outcome())
    text = (place / "scenario.yaml").read_text()
    assert Scenario.model_validate(YAML(typ="safe").load(text)) == recorded.trial().scenario
    assert "time_limit" in text


def test_the_manifest_explains_the_run(tmp_path: Path) -> None:
    place = files.write(
        tmp_path / "run", recorded.trial(), recorded.plan(), recorded.outcome(), command="testbed run x.yaml"
    )
    manifest = json.loads((place / "manifest.json").read_text())
    assert manifest["command"] == "testbed run x.yaml"
    assert manifest["seed"] == 3
    assert manifest["host"]["backend"] == "userspace"
    assert manifest["versions"]["torch"]


def test_an_existing_run_is_never_overwritten(tmp_path: Path) -> None:
    places = [files.write(tmp_path / "run", recorded.trial(), recorded.plan(), recorded.outcome()) for _ in range(3)]
    assert [place.name for place in places] == ["run", "run-2", "run-3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-2", "run-3"]


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert files.write(tmp_path / "run", recorded.trial(), recorded.plan(), recorded.outcome()).name == "run"


def test_nothing_half_written_stays(tmp_path: Path) -> None:
    outcome = recorded.outcome(host={"image": object()}, events=[Event(0.0, "a", "log", {"text": object()})])
    with pytest.raises(TypeError):
        files.write(tmp_path / "run", recorded.trial(), recorded.plan(), outcome)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_share_memory_are_written(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    weight = torch.arange(6.0).reshape(2, 3)
    outcome = recorded.outcome(weights={"0.weight": weight, "1.weight": weight.t()})
    place = files.write(tmp_path / "run", recorded.trial(), recorded.plan(), outcome)
    assert torch.equal(load_file(place / "weights.safetensors")["1.weight"], weight.t())


def test_a_run_that_failed_at_once_is_written(tmp_path: Path) -> None:
    outcome = recorded.outcome(status="failed", error="no image", events=[], links=[], fidelity={})
    place = files.write(tmp_path / "run", recorded.trial(), recorded.plan(), outcome)
    assert json.loads((place / "metrics.json").read_text())["verdict"]["reasons"]


def test_a_run_reads_back_as_it_was_written(tmp_path: Path) -> None:
    place = files.write(tmp_path / "run", recorded.trial(), recorded.plan(), recorded.outcome())
    run = files.load(place)
    assert run.outcome == recorded.outcome()
    assert run.plan == recorded.plan()
    assert run.trial.scenario.model_dump() == recorded.trial().scenario.model_dump()
    written = json.loads((place / "metrics.json").read_text())
    files.rebuild(run)
    assert json.loads((place / "metrics.json").read_text()) == written


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    place = files.write(tmp_path / "run", recorded.trial(), recorded.plan(), recorded.outcome())
    text = (place / "events.jsonl").read_text()
    (place / "events.jsonl").write_text(text[:-20])
    assert files.load(place).outcome.events == recorded.events()[:-1]


def test_damage_elsewhere_is_named(tmp_path: Path) -> None:
    place = files.write(tmp_path / "run", recorded.trial(), recorded.plan(), recorded.outcome())
    (place / "events.jsonl").write_text('{"time": 1}\n')
    with pytest.raises(InputError, match=r"events\.jsonl:1: is not an event"):
        files.load(place)
    (place / "events.jsonl").write_text("")
    (place / "plan.json").write_text('{"method": "pipeline", "assignments": []}')
    with pytest.raises(InputError, match=r"not written by this version of the testbed: plan\.json: "):
        files.load(place)
    (place / "plan.json").unlink()
    with pytest.raises(InputError, match=r"plan\.json: is missing"):
        files.load(place)
    with pytest.raises(InputError, match="holds no run"):
        files.load(tmp_path)
    with pytest.raises(InputError, match="holds no run"):
        files.load_all(tmp_path / "nowhere")


def test_names_of_the_runs_of_a_sweep() -> None:
    point = {"network.link.rate": "10mbit", "workload.method.options": "a/b c"}
    assert run_name(replace(recorded.trial(), point=point)) == "recorded,rate=10mbit,options=a_b_c"
    point = {"devices.a.profile": "laptop", "devices.b.profile": "laptop"}
    name = run_name(replace(recorded.trial(), point=point, repetition=1))
    assert name == "recorded,devices.a.profile=laptop,devices.b.profile=laptop,repetition=2"
