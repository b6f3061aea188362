"""The report of a run in the terminal. Summaries of sweeps are in test_terminal_tables.py."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from testbed.plan import Assignment, Plan
from testbed.trace.events import Event
from testbed.trace.metrics_spec import Metric, MetricsSpec, Row
from testbed_controller.report import html, terminal
from testbed_controller.results import files
from testbed_controller.results.comparison import compare
from testbed_controller.results.run import Run
from testbed_controller.results.summary import summary_of
from testbed_controller.running.live import LiveProgress
from tests.controller.report.recorded_runs import load_recorded, text_of
from tests.helpers import recorded


def print_run(run: Run, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    terminal.show(console, run)
    return text_of(console)


def in_one_line(text: str) -> str:
    # Texts are wrapped at the width of the console.
    return " ".join(text.split())


@pytest.mark.parametrize("width", [80, 120])
def test_finished_run_fits_width_without_shortened_cells(
    tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Paths are shown relative to the working directory, so that they are short.
    monkeypatch.chdir(tmp_path)
    expect = {"accuracy": ">= 0.9", "recoveries": "== 2"}
    text = print_run(load_recorded(tmp_path / "run", {"expect": expect}), width)
    assert max(len(line) for line in text.splitlines()) <= width
    for part in (
        "Accuracy",
        "95.0%",
        "1.68 s",
        "kill b",
        "8 mbit, 10 ms",
        "7.8–7.9 mbit",
        "✔ trusted",
    ):
        assert part in text
    assert "report.html" in text.replace("\n", "")
    assert "✘   recoveries   == 2" in text
    # rich ends shortened cells with an ellipsis.
    assert "…" not in text
    # The column of profiles needs a wide terminal.
    assert ("laptop" in text) == (width >= 100)


def test_device_names_are_complete_beside_long_times(tmp_path: Path) -> None:
    events = recorded.slow_down(recorded.make_events(), 300.0)
    text = print_run(load_recorded(tmp_path / "run", events=events), 80)
    devices = text[text.index("Devices") : text.index("Links")]
    assert "Down" in devices
    assert {"Device", "a", "b"} <= set(devices.split())
    assert "5 min" in devices


def test_weights_of_failed_run_are_named(tmp_path: Path) -> None:
    parts = dict.fromkeys(("a", "b", "c"), b"weights")
    run = load_recorded(
        tmp_path / "run", status="timed out", error="not over after 6 s", parts=parts
    )
    text = in_one_line(print_run(run, 80))
    assert "weights-a.safetensors, weights-b.safetensors and 1 more" in text


def test_verdict_lists_reasons_against_run(tmp_path: Path) -> None:
    run = load_recorded(
        tmp_path / "run",
        status="failed",
        # Brackets could be mistaken for markup of rich.
        error="a[b] died",
        fidelity={"host_stolen": 0.9},
    )
    text = print_run(run, 80)
    assert "✘ not trusted" in text
    assert "the run failed: a[b] died" in text
    assert "a hypervisor kept 90.0%" in text


def test_link_backend_and_congestion_control_are_named(tmp_path: Path) -> None:
    fidelity = {"backend": "userspace", "congestion_control": "reno"}
    run = load_recorded(tmp_path / "run", fidelity=fidelity)
    line = "shaped by userspace, TCP with reno"
    assert line in in_one_line(print_run(run, 100))
    assert line in html.render(run)


def test_run_without_events_is_printed(tmp_path: Path) -> None:
    run = load_recorded(
        tmp_path / "run",
        events=[],
        links=[],
        fidelity={},
        status="failed",
        error="no engine",
    )
    assert "no engine" in print_run(run, 80)


def test_brackets_of_partition_are_not_read_as_markup(tmp_path: Path) -> None:
    events = []
    for event in recorded.make_events():
        if event.event == "fault":
            fields = {**event.fields, "target": "[a] [b]"}
            event = Event(event.time, event.device, "fault", fields)
        events.append(event)
    run = load_recorded(tmp_path / "run", events=events)
    assert "kill [a] [b]" in print_run(run, 80)


def test_inference_shows_waiting_time_failures_and_memory(tmp_path: Path) -> None:
    weights = 4_000_000
    events = [
        Event(1.0, "a", "request", {"request": 0, "latency": 0.99}),
        Event(2.0, "a", "failed", {"request": 1, "error": "b was lost", "after": 0.5}),
        Event(0.1, "a", "memory", {"weights": weights, "activations": 0}),
        Event(0.2, "a", "memory", {"weights": weights, "activations": 2_000_000}),
        Event(0.2, "b", "memory", {"weights": 5_000_000, "activations": 500_000}),
    ]
    workload = {
        "task": "infer",
        "method": {"name": "distributed"},
        "model": recorded.SCENARIO["workload"]["model"],
        "requests": 2,
    }
    run = load_recorded(tmp_path / "run", {"workload": workload}, events=events)
    text = in_one_line(print_run(run, 120))
    assert ", 1 failed" in text
    # A latency of 0.99 s, where the recorded plan predicts 0.9 s.
    prediction = "Predicted 900 ms a request, by the plan; measured over predicted: 1.1"
    assert prediction in text
    assert "of computing on the critical path of a request" in text
    # Device a needs more memory than b: 4 MB + 2 MB.
    assert "Memory 6 MB at most, on a: 4 MB weights, 2 MB activations" in text


def test_failed_request_is_reported_at_once_with_reason() -> None:
    console = Console(file=io.StringIO(), width=120)
    fields = {"request": 1, "error": "b was lost"}
    LiveProgress(console, "run", 4, "requests").event(Event(2.0, "a", "failed", fields))
    assert "2.00 s  request 1 failed: b was lost" in text_of(console)


@pytest.mark.parametrize(
    ("step", "place"),
    [({"step": 3}, " at step 3"), ({}, "")],
    ids=["training", "inference"],
)
def test_recovery_message_names_step_of_training(
    step: dict[str, int], place: str
) -> None:
    console = Console(file=io.StringIO(), width=120)
    fields = {"phase": "detected", "missing": ["b"], **step}
    progress = LiveProgress(console, "run", 4, "requests")
    progress.event(Event(2.0, "a", "recovery", fields))
    assert f"recovery detected{place}: b silent" in text_of(console)


def test_report_lists_manual_link_changes(tmp_path: Path) -> None:
    properties = {"rate": 5e6, "delay": 0.02, "loss": 0.0, "up": True}
    events = recorded.make_events()
    for source, destination in ("ab", "ba"):
        fields = {"source": source, "destination": destination, **properties}
        events.append(Event(3.0, "testbed", "link", fields))
    events.sort(key=lambda event: event.time)
    run = load_recorded(tmp_path / "run", events=events)
    text = print_run(run, 100)
    assert "Link changes" in text
    # Equal changes of both directions are one line.
    words = [line.split() for line in text.splitlines()]
    assert ["3.00", "s", "a", "↔", "b", "5", "mbit,", "20", "ms"] in words
    assert "<h2>Link changes</h2>" in html.render(run)


def test_metrics_without_meaning_for_programs_are_omitted(tmp_path: Path) -> None:
    programs = {name: {"command": ["true"]} for name in "ab"}
    workload = {"task": "program", "programs": programs}
    requests = []
    for number in range(1, 4):
        fields = {"request": number, "latency": 0.5}
        requests.append(Event(float(number), "a", "request", fields))
    assignments = []
    for name in "ab":
        assignments.append(Assignment(device=name, start=0, stop=0, memory=0.0))
    folder = recorded.write_run(
        tmp_path / "run",
        recorded.make_trial(workload=workload),
        Plan(method="program", coordinator="a", assignments=tuple(assignments)),
        recorded.make_outcome(events=requests),
    )
    text = print_run(files.load(folder), 120)
    assert "Latency" in text
    # The testbed does not know the weights and messages of programs.
    for word in ("Weights", "Path", "Carried"):
        assert word not in text.split()


def test_metric_with_value_for_each_device_has_no_cell(tmp_path: Path) -> None:
    laps = Metric("laps", "number", "laps", lambda _: None, brief=True, compared=True)
    spec = MetricsSpec((laps,), rows=(Row("Laps", "{laps}"),))
    run = load_recorded(tmp_path / "run")
    values = {**run.metrics, "laps": {"a": 1, "b": 2}}
    grouped = replace(run, metrics=values, declared=spec)
    console = Console(file=io.StringIO(), width=100)
    terminal.show_briefly(console, grouped)
    terminal.show(console, grouped)
    assert "laps" not in text_of(console).lower()
    assert "laps" not in summary_of([grouped])["points"][0]["metrics"]
    compared = compare({"one": [grouped], "other": [grouped]})
    assert "laps" not in [row["name"] for row in compared["metrics"]]
