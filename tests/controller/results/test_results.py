"""Writing of results: files of a run, names of folders, and runs that end early. Reading is in test_reading.py."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from testbed.common import yamltext
from testbed.common.errors import HostError, InputError
from testbed.scenario.loading import load
from testbed.scenario.schema import Scenario
from testbed.trace.events import Event
from testbed.wire import arrays, tensors
from testbed_controller.results import files, recorder
from testbed_controller.results.run import run_name
from tests.controller.results.recorded_folders import start_recorder, write_recorded
from tests.helpers import recorded


def test_run_writes_every_file(tmp_path: Path) -> None:
    folder = write_recorded(tmp_path / "run")
    assert folder == tmp_path / "run"
    assert {path.name for path in folder.iterdir()} >= {
        "scenario.yaml",
        "plan.json",
        "manifest.json",
        "events.jsonl",
        "metrics.json",
        "fidelity.json",
        "trace.json",
    }
    assert json.loads((folder / "metrics.json").read_text())["accuracy"] == 0.95
    fidelity = json.loads((folder / "fidelity.json").read_text())
    assert fidelity["verdict"]["kind"] == "trusted"
    lines = (folder / "events.jsonl").read_text().splitlines()
    assert [Event.from_json(line) for line in lines] == recorded.make_events()


def test_resolved_scenario_loads_as_equal_scenario(tmp_path: Path) -> None:
    text = (write_recorded(tmp_path / "run") / "scenario.yaml").read_text()
    scenario = Scenario.model_validate(yamltext.values(text))
    assert scenario == recorded.make_trial().scenario
    # Defaults are written, too.
    assert "time_limit" in text


def test_manifest_has_command_seed_host_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["testbed", "run", "x.yaml"])
    folder = write_recorded(tmp_path / "run")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["command"] == "testbed run x.yaml"
    assert manifest["seed"] == 3
    assert manifest["host"]["backend"] == "userspace"
    assert manifest["versions"]["torch"]


def test_revision_is_dirty_only_after_changes_that_affect_runs(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        # Commits need an author, whom this machine may not have configured.
        author = ["-c", "user.name=one", "-c", "user.email=one@example.org"]
        command = ["git", "-C", str(tmp_path), *author, *arguments]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        return result.stdout.strip()

    assert recorder.revision(tmp_path) is None
    docs = tmp_path / "docs/papers.md"
    results = tmp_path / "papers/results.json"
    scenario = tmp_path / "scenarios/one.yaml"
    for file in (docs, results, scenario):
        file.parent.mkdir()
        file.write_text("before\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    assert recorder.revision(tmp_path) == commit
    docs.write_text("after\n")
    assert recorder.revision(tmp_path) == commit
    results.write_text("after\n")
    assert recorder.revision(tmp_path) == commit
    scenario.write_text("after\n")
    assert recorder.revision(tmp_path) == f"{commit}-dirty"


def test_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    events = write_recorded(tmp_path / "run") / "events.jsonl"
    content = events.read_bytes()
    with pytest.raises(InputError, match="already exists"):
        write_recorded(tmp_path / "run", events=[])
    assert events.read_bytes() == content
    assert recorder.create_numbered_folder(tmp_path / "run").name == "run-2"


def test_simultaneous_runs_with_one_name_have_different_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "run"
    with ThreadPoolExecutor(8) as pool:
        folders = list(
            pool.map(lambda _: recorder.create_numbered_folder(folder), range(20))
        )
    # The first run has no number.
    expected = {"run", *(f"run-{number}" for number in range(2, 21))}
    assert {folder.name for folder in folders} == expected


def test_second_run_in_same_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both runs have seen an empty folder before either wrote into it.
    monkeypatch.setattr(Path, "iterdir", lambda _path: iter(()))
    first = start_recorder(tmp_path / "run")
    with pytest.raises(InputError, match="already exists"):
        start_recorder(tmp_path / "run")
    first.finish(recorded.make_outcome(events=[]))


def test_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert write_recorded(tmp_path / "run").name == "run"


def test_folder_that_cannot_be_created_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="cannot be written: Not a directory"):
        start_recorder(tmp_path / "file" / "run")


def test_abandoned_run_has_folder_only_with_events(tmp_path: Path) -> None:
    for name, events in (("without-events", 0), ("with-events", 3)):
        writer = start_recorder(tmp_path / name, events)
        writer.abandon(HostError("the engine went away"))
    assert not (tmp_path / "without-events").exists()
    outcome = files.load(tmp_path / "with-events").outcome
    assert outcome.status == "failed"
    assert outcome.error == "the engine went away"
    assert len(outcome.events) == 3


@pytest.mark.parametrize("has_events", [True, False])
def test_error_after_end_of_run_changes_no_status(
    has_events: bool, tmp_path: Path
) -> None:
    writer = recorder.Recorder(
        tmp_path / "run",
        recorded.make_trial(),
        recorded.make_plan(),
        "simulate",
        events=has_events,
    )
    writer.finish(recorded.make_outcome())
    writer.abandon(ValueError("an exporter cannot close its file"))
    facts = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert facts["status"] == "finished"
    assert facts["error"] is None


def test_full_disk_is_reported_in_one_line(tmp_path: Path) -> None:
    writer = start_recorder(tmp_path / "run")
    writer._events.close()
    # Linux has a device where every write fails as on a full disk.
    writer._events = full = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115
    message = "run: cannot be written: No space left on device"
    with pytest.raises(HostError, match=message):
        writer.event(recorded.make_events()[0])
    # Closing writes once more.
    with suppress(OSError):
        full.close()


def test_events_are_stored_in_order_of_time(tmp_path: Path) -> None:
    writer = start_recorder(tmp_path / "run")
    # Events of several devices arrive in any order.
    for event in reversed(recorded.make_events()):
        writer.event(event)
    folder = writer.finish(recorded.make_outcome()).path
    assert files.load(folder).outcome.events == recorded.make_events()


def test_weights_with_shared_memory_are_written(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    weight = torch.arange(6.0).reshape(2, 3)
    # The transposed tensor is a view of the first one.
    raw = arrays.to_raw({"0.weight": weight, "1.weight": weight.t()})
    content = b"".join(tensors.write(raw))
    folder = write_recorded(tmp_path / "run", weights_file=content)
    restored = load_file(folder / "weights.safetensors")
    assert torch.equal(restored["1.weight"], weight.t())


def test_run_without_events_has_verdict_with_reasons(tmp_path: Path) -> None:
    folder = write_recorded(
        tmp_path / "run",
        status="failed",
        error="no image",
        events=[],
        links=[],
        fidelity={},
    )
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["verdict"]["reasons"]


def test_run_of_sweep_is_named_by_its_point() -> None:
    trial = recorded.make_trial()
    point = {"network.link.rate": "10mbit", "workload.method.options": "a/b c"}
    # A name of a folder has neither slashes nor spaces.
    assert run_name(replace(trial, point=point)) == (
        "recorded,rate=10mbit,options=a_b_c"
    )
    point = {"devices.a.profile": "laptop", "devices.b.profile": "laptop"}
    name = run_name(replace(trial, point=point, repetition=1))
    # The last part of these keys is the same, and repetitions count from 1.
    assert name == (
        "recorded,devices.a.profile=laptop,devices.b.profile=laptop,repetition=2"
    )


def test_long_names_with_different_ends_remain_different() -> None:
    names = set()
    for end in "ab":
        point = {"description": "x" * 300 + end}
        names.add(run_name(replace(recorded.make_trial(), point=point)))
    assert len(names) == 2
    # File systems allow 255 bytes; the rest is for suffixes of files.
    for name in names:
        assert len(name) == 200


def test_code_files_of_training_and_method_options_are_stored(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def loss(outputs, labels):\n    return outputs.sum()\n\nclass Half:\n    pass\n"
    )
    (tmp_path / "s.yaml").write_text(
        "name: s\ndevices: {a: {}, b: {}}\nnetwork: {topology: mesh, link: {delay: 1ms}}\n"
        "workload:\n  steps: 1\n"
        "  model: {name: mlp}\n  data: {name: digits}\n  training: {loss: {name: loss, file: own.py}}\n"
        "  method: {name: pipeline, transfer: {activations: {name: Half, file: own.py}}}\n"
    )
    _, sources = recorder.with_local_sources(load(tmp_path / "s.yaml"))
    assert sources == {"own.py": (tmp_path / "own.py").read_text()}
