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
from testbed_controller.results.files import progress
from testbed_controller.results.run import run_name
from tests.helpers import recorded


def test_a_run_leaves_every_file(tmp_path: Path) -> None:
    place = recorded.write_run(
        tmp_path / "run",
        recorded.make_trial(),
        recorded.make_plan(),
        recorded.make_outcome(),
    )
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
    assert (
        json.loads((place / "fidelity.json").read_text())["verdict"]["kind"]
        == "trusted"
    )
    lines = (place / "events.jsonl").read_text().splitlines()
    assert [Event.from_json(line) for line in lines] == recorded.make_events()


def test_the_resolved_scenario_loads_back_equal(tmp_path: Path) -> None:
    place = recorded.write_run(
        tmp_path / "run",
        recorded.make_trial(),
        recorded.make_plan(),
        recorded.make_outcome(),
    )
    text = (place / "scenario.yaml").read_text()
    assert (
        Scenario.model_validate(yamltext.values(text)) == recorded.make_trial().scenario
    )
    assert "time_limit" in text


def test_the_manifest_explains_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["testbed", "run", "x.yaml"])
    place = recorded.write_run(
        tmp_path / "run",
        recorded.make_trial(),
        recorded.make_plan(),
        recorded.make_outcome(),
    )
    manifest = json.loads((place / "manifest.json").read_text())
    assert manifest["command"] == "testbed run x.yaml"
    assert manifest["seed"] == 3
    assert manifest["host"]["backend"] == "userspace"
    assert manifest["versions"]["torch"]


def test_only_what_may_change_a_run_marks_the_revision(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = [
            "git",
            "-C",
            str(tmp_path),
            "-c",
            "user.name=one",
            "-c",
            "user.email=one@example.org",
            *arguments,
        ]
        return subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout.strip()

    assert recorder.revision(tmp_path) is None
    files_ = [
        tmp_path / "docs/papers.md",
        tmp_path / "papers/results.json",
        tmp_path / "scenarios/one.yaml",
    ]
    for file in files_:
        file.parent.mkdir()
        file.write_text("before\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    for file, found in zip(
        [None, *files_], [commit, commit, commit, f"{commit}-dirty"], strict=True
    ):
        if file is not None:
            file.write_text("after\n")
        assert recorder.revision(tmp_path) == found


def test_an_existing_run_is_never_overwritten(tmp_path: Path) -> None:
    place = recorded.write_run(
        tmp_path / "run",
        recorded.make_trial(),
        recorded.make_plan(),
        recorded.make_outcome(),
    )
    before = (place / "events.jsonl").read_bytes()
    with pytest.raises(InputError, match="already exists"):
        recorded.write_run(
            tmp_path / "run",
            recorded.make_trial(),
            recorded.make_plan(),
            recorded.make_outcome(events=[]),
        )
    assert (place / "events.jsonl").read_bytes() == before
    assert recorder.numbered(tmp_path / "run").name == "run-2"


def test_runs_of_one_name_at_once_take_a_number_each(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        places = list(
            pool.map(
                lambda _: recorder.numbered(tmp_path / "results" / "run"), range(20)
            )
        )
    assert {place.name for place in places} == {
        "run",
        *(f"run-{number}" for number in range(2, 21)),
    }


def test_of_two_runs_that_write_to_one_folder_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both have seen it empty.
    monkeypatch.setattr(Path, "iterdir", lambda _path: iter(()))
    begun = recorder.Recorder(
        tmp_path / "run", recorded.make_trial(), recorded.make_plan(), "emulate"
    )
    with pytest.raises(InputError, match="already exists"):
        recorder.Recorder(
            tmp_path / "run", recorded.make_trial(), recorded.make_plan(), "emulate"
        )
    begun.finish(recorded.make_outcome(events=[]))


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert (
        recorded.write_run(
            tmp_path / "run",
            recorded.make_trial(),
            recorded.make_plan(),
            recorded.make_outcome(),
        ).name
        == "run"
    )


def test_a_place_that_cannot_be_written_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="cannot be written: Not a directory"):
        recorder.Recorder(
            tmp_path / "file" / "run",
            recorded.make_trial(),
            recorded.make_plan(),
            "simulate",
        )


def test_a_run_that_was_cut_off_reads_back_as_far_as_it_went(tmp_path: Path) -> None:
    begun = recorder.Recorder(
        tmp_path / "run", recorded.make_trial(), recorded.make_plan(), "emulate"
    )
    seen = recorded.make_events()[:20]
    for event in seen:
        begun.event(event)
    run = files.load(
        tmp_path / "run"
    )  # as after SIGKILL: nothing was closed or flushed
    assert run.outcome.events == seen
    assert run.outcome.status == "interrupted"
    assert (
        run.outcome.error
        == f"cut off after {seen[-1].time:.2f} s: testbed ended before the run did"
    )
    recorder.rebuild(run)
    assert (
        json.loads((tmp_path / "run" / "metrics.json").read_text())["status"]
        == "interrupted"
    )


def test_a_run_that_never_began_leaves_no_folder_and_one_that_did_says_why_it_ended(
    tmp_path: Path,
) -> None:
    for name, events in (("idle", []), ("begun", recorded.make_events()[:3])):
        begun = recorder.Recorder(
            tmp_path / name, recorded.make_trial(), recorded.make_plan(), "emulate"
        )
        for event in events:
            begun.event(event)
        begun.abandon(HostError("the engine went away"))
    assert not (tmp_path / "idle").exists()
    outcome = files.load(tmp_path / "begun").outcome
    assert (outcome.status, outcome.error, len(outcome.events)) == (
        "failed",
        "the engine went away",
        3,
    )


@pytest.mark.parametrize("events", [True, False])
def test_error_after_the_end_changes_no_finished_run(
    events: bool, tmp_path: Path
) -> None:
    writer = recorder.Recorder(
        tmp_path / "run",
        recorded.make_trial(),
        recorded.make_plan(),
        "simulate",
        events=events,
    )
    writer.finish(recorded.make_outcome())
    writer.abandon(ValueError("an exporter cannot close its file"))
    facts = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (facts["status"], facts["error"]) == ("finished", None)


def test_a_full_disk_is_said_in_one_line(tmp_path: Path) -> None:
    begun = recorder.Recorder(
        tmp_path / "run", recorded.make_trial(), recorded.make_plan(), "emulate"
    )
    begun._events.close()
    begun._events = full = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115
    with pytest.raises(
        HostError, match="run: cannot be written: No space left on device"
    ):
        begun.event(recorded.make_events()[0])
    with suppress(OSError):
        full.close()


def test_events_that_came_out_of_order_are_kept_in_order(tmp_path: Path) -> None:
    begun = recorder.Recorder(
        tmp_path / "run", recorded.make_trial(), recorded.make_plan(), "emulate"
    )
    for event in reversed(recorded.make_events()):
        begun.event(event)
    place = begun.finish(recorded.make_outcome()).path
    assert files.load(place).outcome.events == recorded.make_events()


def test_progress_is_told_by_the_last_events(tmp_path: Path) -> None:
    begun = recorder.Recorder(
        tmp_path / "run", recorded.make_trial(), recorded.make_plan(), "emulate"
    )
    assert str(progress(begun.path)) == "0.0 s"
    for event in recorded.make_events():
        begun.event(event)
    with (begun.path / "events.jsonl").open("a") as file:
        file.write('{"time": 99, "dev')
    last = [event for event in recorded.make_events() if event.event == "step"][-1]
    found = progress(begun.path)
    assert (found.step, found.loss) == (last.fields["step"], last.fields["loss"])
    assert set(found.doing) == {
        event.device for event in recorded.make_events() if event.event == "compute"
    }


def test_finished_runs_are_kept_and_others_made_again(tmp_path: Path) -> None:
    trial = recorded.make_trial()
    places = [tmp_path / name for name in ("finished", "failed", "missing")]
    recorded.write_run(places[0], trial, recorded.make_plan(), recorded.make_outcome())
    recorded.write_run(
        places[1],
        trial,
        recorded.make_plan(),
        recorded.make_outcome(status="failed", error="x"),
    )
    assert list(files.keep_finished_runs(places, [trial] * 3)) == [0]
    assert not places[1].exists()
    noted = replace(
        trial, scenario=trial.scenario.model_copy(update={"description": "other words"})
    )
    assert list(files.keep_finished_runs(places, [noted] * 3)) == [0], (
        "words change no run"
    )
    other = replace(trial, scenario=trial.scenario.model_copy(update={"seed": 99}))
    with pytest.raises(InputError, match="a run of another scenario"):
        files.keep_finished_runs(places, [other] * 3)


def test_a_run_whose_scenario_says_null_is_gone_on_with(tmp_path: Path) -> None:
    trial = recorded.make_trial(
        workload=recorded.SCENARIO["workload"]
        | {"method": {"name": "pipeline", "stall_timeout": None}}
    )
    recorded.write_run(
        tmp_path / "run", trial, recorded.make_plan(), recorded.make_outcome()
    )
    assert list(files.keep_finished_runs([tmp_path / "run"], [trial])) == [0]


def test_weights_that_share_memory_are_written(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    weight = torch.arange(6.0).reshape(2, 3)
    shared = tensors.write(arrays.to_raw({"0.weight": weight, "1.weight": weight.t()}))
    outcome = recorded.make_outcome(weights_file=b"".join(shared))
    place = recorded.write_run(
        tmp_path / "run", recorded.make_trial(), recorded.make_plan(), outcome
    )
    assert torch.equal(load_file(place / "weights.safetensors")["1.weight"], weight.t())


def test_a_run_that_failed_at_once_is_written(tmp_path: Path) -> None:
    outcome = recorded.make_outcome(
        status="failed", error="no image", events=[], links=[], fidelity={}
    )
    place = recorded.write_run(
        tmp_path / "run", recorded.make_trial(), recorded.make_plan(), outcome
    )
    assert json.loads((place / "metrics.json").read_text())["verdict"]["reasons"]


def test_a_run_reads_back_as_it_was_written(tmp_path: Path) -> None:
    place = recorded.write_run(
        tmp_path / "run",
        recorded.make_trial(),
        recorded.make_plan(),
        recorded.make_outcome(),
    )
    run = files.load(place)
    assert run.outcome == recorded.make_outcome()
    assert run.plan == recorded.make_plan()
    assert (
        run.trial.scenario.model_dump() == recorded.make_trial().scenario.model_dump()
    )
    written = json.loads((place / "metrics.json").read_text())
    recorder.rebuild(run)
    assert json.loads((place / "metrics.json").read_text()) == written


def test_figures_are_read_without_the_events_where_they_were_written(
    tmp_path: Path,
) -> None:
    place = recorded.write_run(
        tmp_path / "run",
        recorded.make_trial(),
        recorded.make_plan(),
        recorded.make_outcome(),
    )
    run = files.load(place)
    (place / "events.jsonl").write_text("damaged\n")
    assert files.load_metrics(place) == run.alone()
    (place / "metrics.json").write_text('{"status": "finished"}')
    with pytest.raises(InputError, match=r"events\.jsonl:1"):
        files.load_metrics(place)  # figures of an older version are computed again


def test_figures_of_a_run_that_was_cut_off_are_computed(tmp_path: Path) -> None:
    begun = recorder.Recorder(
        tmp_path / "run", recorded.make_trial(), recorded.make_plan(), "emulate"
    )
    for event in recorded.make_events()[:20]:
        begun.event(event)
    found = files.load_metrics(begun.path)
    assert found == files.load(begun.path).alone()
    assert found.metrics["status"] == "interrupted"


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    place = recorded.write_run(
        tmp_path / "run",
        recorded.make_trial(),
        recorded.make_plan(),
        recorded.make_outcome(),
    )
    text = (place / "events.jsonl").read_text()
    (place / "events.jsonl").write_text(text[:-20])
    assert files.load(place).outcome.events == recorded.make_events()[:-1]


def test_damage_elsewhere_is_named(tmp_path: Path) -> None:
    place = recorded.write_run(
        tmp_path / "run",
        recorded.make_trial(),
        recorded.make_plan(),
        recorded.make_outcome(),
    )
    (place / "events.jsonl").write_text('{"time": 1}\n')
    with pytest.raises(InputError, match=r"events\.jsonl:1: is not an event"):
        files.load(place)
    (place / "events.jsonl").write_text("")
    (place / "plan.json").write_text('{"method": "pipeline", "assignments": []}')
    with pytest.raises(
        InputError, match=r"not written by this version of the testbed: plan\.json: "
    ):
        files.load(place)
    (place / "plan.json").unlink()
    with pytest.raises(InputError, match=r"plan\.json: not found"):
        files.load(place)
    with pytest.raises(InputError, match="has no run"):
        files.load(tmp_path)
    with pytest.raises(InputError, match="has no run"):
        files.load(files.places(tmp_path / "nowhere")[0])


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
def test_value_of_another_type_is_named(
    file: str, key: str, value: object, tmp_path: Path
) -> None:
    place = recorded.write_run(
        tmp_path / "run",
        recorded.make_trial(),
        recorded.make_plan(),
        recorded.make_outcome(),
    )
    content = json.loads((place / file).read_text())
    (place / file).write_text(json.dumps({**content, key: value}))
    for read in (files.load, files.load_metrics):
        with pytest.raises(InputError, match=rf"{file}: {key}.*: the file is damaged"):
            read(place)


@pytest.mark.parametrize(
    "fields",
    [
        {"time": "1.0", "device": "a", "event": "step"},
        {"time": 1.0, "device": ["a"], "event": "step"},
        {"time": True, "device": "a", "event": "step"},
        {"time": 1.0, "device": "a", "event": None},
    ],
)
def test_event_with_a_value_of_another_type_is_named(
    fields: dict[str, object], tmp_path: Path
) -> None:
    place = recorded.write_run(
        tmp_path / "run",
        recorded.make_trial(),
        recorded.make_plan(),
        recorded.make_outcome(),
    )
    file = place / "events.jsonl"
    first, *rest = file.read_text().splitlines()
    file.write_text("\n".join([first, json.dumps(fields), *rest]) + "\n")
    with pytest.raises(InputError, match=r"events\.jsonl:2: is not an event"):
        files.load(place)


@pytest.mark.parametrize(
    ("event", "field", "value", "kind"),
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
def test_event_field_of_another_type_is_named(
    event: str, field: str, value: object, kind: str, tmp_path: Path
) -> None:
    place = recorded.write_run(
        tmp_path / "run",
        recorded.make_trial(),
        recorded.make_plan(),
        recorded.make_outcome(),
    )
    file = place / "events.jsonl"
    lines = file.read_text().splitlines()
    number = next(
        place for place, line in enumerate(lines) if f'"event": "{event}"' in line
    )
    lines[number] = json.dumps({**json.loads(lines[number]), field: value})
    file.write_text("\n".join(lines) + "\n")
    problem = rf"events\.jsonl:{number + 1}: {event}: field '{field}' must be {kind}"
    with pytest.raises(InputError, match=f"{problem}: the file is damaged"):
        files.load(place)


def test_event_without_a_field_that_metrics_need_is_damage(tmp_path: Path) -> None:
    place = recorded.write_run(
        tmp_path / "run",
        recorded.make_trial(),
        recorded.make_plan(),
        recorded.make_outcome(),
    )
    with (place / "events.jsonl").open("a") as file:
        file.write('{"time": 8.55, "device": "a", "event": "request", "request": 0}\n')
    with pytest.raises(InputError, match=r"events\.jsonl: no metrics follow"):
        files.load(place)


def test_progress_ignores_damaged_lines(tmp_path: Path) -> None:
    begun = recorder.Recorder(
        tmp_path / "run", recorded.make_trial(), recorded.make_plan(), "emulate"
    )
    for event in recorded.make_events()[:20]:
        begun.event(event)
    known = str(progress(begun.path))
    with (begun.path / "events.jsonl").open("a") as file:
        file.write("damaged\n")
        file.write('{"time": "late", "device": "a", "event": "step"}\n')
        file.write('{"time": 99, "device": "a", "event": "step", "loss": "low"}\n')
    assert str(progress(begun.path)) == known


def test_names_of_the_runs_of_a_sweep() -> None:
    point = {"network.link.rate": "10mbit", "workload.method.options": "a/b c"}
    assert (
        run_name(replace(recorded.make_trial(), point=point))
        == "recorded,rate=10mbit,options=a_b_c"
    )
    point = {"devices.a.profile": "laptop", "devices.b.profile": "laptop"}
    name = run_name(replace(recorded.make_trial(), point=point, repetition=1))
    assert (
        name
        == "recorded,devices.a.profile=laptop,devices.b.profile=laptop,repetition=2"
    )


def test_long_names_that_differ_at_their_ends_only_stay_apart() -> None:
    names = {
        run_name(replace(recorded.make_trial(), point={"description": "x" * 300 + end}))
        for end in "ab"
    }
    assert len(names) == 2
    assert all(len(name) == 200 for name in names)


def test_files_of_training_and_of_a_methods_options_lie_beside_the_scenario(
    tmp_path: Path,
) -> None:
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
