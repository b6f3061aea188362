"""Reading of results: complete, interrupted and damaged runs, progress, and runs that a sweep keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testbed.common.errors import InputError
from testbed.scenario.schema import Trial
from testbed_controller.results import files, recorder
from testbed_controller.results.files import progress
from tests.controller.results.recorded_folders import start_recorder, write_recorded
from tests.helpers import recorded


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_restored_run_equals_written_run(tmp_path: Path) -> None:
    folder = write_recorded(tmp_path / "run")
    run = files.load(folder)
    assert run.outcome == recorded.make_outcome()
    assert run.plan == recorded.make_plan()
    scenario = recorded.make_trial().scenario
    assert run.trial.scenario.model_dump() == scenario.model_dump()
    metrics = read_json(folder / "metrics.json")
    recorder.rebuild(run)
    assert read_json(folder / "metrics.json") == metrics


def test_killed_run_is_read_up_to_last_event(tmp_path: Path) -> None:
    # As after SIGKILL, no file is closed or flushed.
    folder = start_recorder(tmp_path / "run", 20).path
    events = recorded.make_events()[:20]
    run = files.load(folder)
    assert run.outcome.events == events
    assert run.outcome.status == "interrupted"
    end = f"{events[-1].time:.2f} s"
    assert run.outcome.error == (
        f"cut off after {end}: testbed ended before the run did"
    )
    recorder.rebuild(run)
    assert read_json(folder / "metrics.json")["status"] == "interrupted"


def test_metrics_of_killed_run_are_computed(tmp_path: Path) -> None:
    folder = start_recorder(tmp_path / "run", 20).path
    run = files.load_metrics(folder)
    assert run == files.load(folder).without_events()
    assert run.metrics["status"] == "interrupted"


def test_stored_metrics_are_read_without_events(tmp_path: Path) -> None:
    folder = write_recorded(tmp_path / "run")
    run = files.load(folder)
    (folder / "events.jsonl").write_text("damaged\n")
    assert files.load_metrics(folder) == run.without_events()
    # Metrics of an older version are computed again, which needs the events.
    (folder / "metrics.json").write_text('{"status": "finished"}')
    with pytest.raises(InputError, match=r"events\.jsonl:1"):
        files.load_metrics(folder)


def test_progress_has_last_step_and_working_devices(tmp_path: Path) -> None:
    events = recorded.make_events()
    writer = start_recorder(tmp_path / "run")
    assert str(progress(writer.path)) == "0.0 s"
    for event in events:
        writer.event(event)
    # A line that is being written.
    with (writer.path / "events.jsonl").open("a") as file:
        file.write('{"time": 99, "dev')
    *_, last_step = [event.fields for event in events if event.event == "step"]
    state = progress(writer.path)
    assert state.step == last_step["step"]
    assert state.loss == last_step["loss"]
    computing = {event.device for event in events if event.event == "compute"}
    assert set(state.activities) == computing


def test_progress_ignores_damaged_lines(tmp_path: Path) -> None:
    writer = start_recorder(tmp_path / "run", 20)
    before = str(progress(writer.path))
    with (writer.path / "events.jsonl").open("a") as file:
        file.write("damaged\n")
        file.write('{"time": "late", "device": "a", "event": "step"}\n')
        file.write('{"time": 99, "device": "a", "event": "step", "loss": "low"}\n')
    assert str(progress(writer.path)) == before


def with_scenario(trial: Trial, **changes: Any) -> Trial:
    return replace(trial, scenario=trial.scenario.model_copy(update=changes))


def test_finished_runs_are_kept_and_others_removed(tmp_path: Path) -> None:
    trial = recorded.make_trial()
    finished, failed, missing = folders = [
        tmp_path / name for name in ("finished", "failed", "missing")
    ]
    write_recorded(finished)
    write_recorded(failed, status="failed", error="x")
    assert list(files.keep_finished_runs(folders, [trial] * 3)) == [0]
    assert not failed.exists()
    assert not missing.exists()
    # A description does not change a run.
    described = with_scenario(trial, description="other words")
    assert list(files.keep_finished_runs(folders, [described] * 3)) == [0]
    other = with_scenario(trial, seed=99)
    with pytest.raises(InputError, match="a run of another scenario"):
        files.keep_finished_runs(folders, [other] * 3)


def test_finished_run_with_null_in_scenario_is_kept(tmp_path: Path) -> None:
    method = {"name": "pipeline", "stall_timeout": None}
    workload = {**recorded.SCENARIO["workload"], "method": method}
    trial = recorded.make_trial(workload=workload)
    folder = tmp_path / "run"
    plan = recorded.make_plan()
    recorded.write_run(folder, trial, plan, recorded.make_outcome())
    assert list(files.keep_finished_runs([folder], [trial])) == [0]


def test_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    events = write_recorded(tmp_path / "run") / "events.jsonl"
    events.write_text(events.read_text()[:-20])
    outcome = files.load(tmp_path / "run").outcome
    assert outcome.events == recorded.make_events()[:-1]


def test_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    folder = write_recorded(tmp_path / "run")
    (folder / "events.jsonl").write_text('{"time": 1}\n')
    with pytest.raises(InputError, match=r"events\.jsonl:1: is not an event"):
        files.load(folder)
    (folder / "events.jsonl").write_text("")
    (folder / "plan.json").write_text('{"method": "pipeline", "assignments": []}')
    message = r"not written by this version of the testbed: plan\.json: "
    with pytest.raises(InputError, match=message):
        files.load(folder)
    (folder / "plan.json").unlink()
    with pytest.raises(InputError, match=r"plan\.json: not found"):
        files.load(folder)


def test_folder_without_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no run"):
        files.load(tmp_path)
    with pytest.raises(InputError, match="has no run"):
        files.load(files.run_folders(tmp_path / "nowhere")[0])


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("manifest.json", "runtime", {}),
        ("manifest.json", "host", "busy"),
        ("manifest.json", "host", {"computing": 3}),
        ("manifest.json", "host", {"computing": [{"torch": "2.13"}]}),
        ("manifest.json", "revision", ["a"]),
        ("manifest.json", "point", None),
        ("fidelity.json", "measurements", 3),
        ("fidelity.json", "links", [None]),
    ],
)
def test_value_of_wrong_type_is_named(
    file: str, key: str, value: object, tmp_path: Path
) -> None:
    folder = write_recorded(tmp_path / "run")
    content = {**read_json(folder / file), key: value}
    (folder / file).write_text(json.dumps(content))
    message = rf"{file}: {key}.*: the file is damaged"
    for read in (files.load, files.load_metrics):
        with pytest.raises(InputError, match=message):
            read(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"time": "1.0", "device": "a", "event": "step"},
        {"time": 1.0, "device": ["a"], "event": "step"},
        # Python's booleans are numbers.
        {"time": True, "device": "a", "event": "step"},
        {"time": 1.0, "device": "a", "event": None},
    ],
)
def test_event_with_value_of_wrong_type_is_named(
    fields: dict[str, object], tmp_path: Path
) -> None:
    folder = write_recorded(tmp_path / "run")
    file = folder / "events.jsonl"
    first, *others = file.read_text().splitlines()
    file.write_text("\n".join([first, json.dumps(fields), *others]) + "\n")
    with pytest.raises(InputError, match=r"events\.jsonl:2: is not an event"):
        files.load(folder)


@pytest.mark.parametrize(
    ("event", "field", "value", "expected"),
    [
        ("step", "loss", "low", "a number or null"),
        ("compute", "start", None, "a number"),
        ("compute", "duration", "0.2", "a number"),
        ("send", "bytes", [1], "a number"),
        ("send", "peer", 3, "a text"),
        ("fault", "intended", {}, "a number"),
        ("evaluate", "accuracy", "high", "a number or null"),
        ("state", "state", 1, "a text"),
    ],
)
def test_event_field_of_wrong_type_is_named(
    event: str, field: str, value: object, expected: str, tmp_path: Path
) -> None:
    folder = write_recorded(tmp_path / "run")
    file = folder / "events.jsonl"
    lines = file.read_text().splitlines()
    index = next(
        index for index, line in enumerate(lines) if f'"event": "{event}"' in line
    )
    lines[index] = json.dumps({**json.loads(lines[index]), field: value})
    file.write_text("\n".join(lines) + "\n")
    # Lines are counted from 1.
    place = rf"events\.jsonl:{index + 1}: {event}"
    message = f"{place}: field '{field}' must be {expected}: the file is damaged"
    with pytest.raises(InputError, match=message):
        files.load(folder)


def test_event_without_field_needed_by_metrics_is_damage(tmp_path: Path) -> None:
    folder = write_recorded(tmp_path / "run")
    # A request without its latency.
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"time": 8.55, "device": "a", "event": "request", "request": 0}\n')
    with pytest.raises(InputError, match=r"events\.jsonl: no metrics follow"):
        files.load(folder)
