from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from testbed.plan import Assignment, Plan
from testbed.trace.events import Event
from testbed.trace.metrics import metrics
from testbed.trace.metrics_spec import Metric, MetricsSpec, Row
from testbed_controller.report import html, sweep, terminal
from testbed_controller.report.grouping import group_links
from testbed_controller.report.tables import (
    Cell,
    Column,
    Section,
    draw_section,
    number_columns,
    plain_table,
    split_wide,
)
from testbed_controller.results import files
from testbed_controller.results.comparison import compare
from testbed_controller.results.run import Run
from testbed_controller.results.summary import summary_of
from testbed_controller.running.live import LiveProgress
from tests.helpers import recorded


def run(folder: Path, scenario: dict[str, Any] | None = None, **changes: Any) -> Run:
    trial = recorded.make_trial(**(scenario or {}))
    return files.load(
        recorded.write_run(
            folder / "run",
            trial,
            recorded.make_plan(),
            recorded.make_outcome(**changes),
        )
    )


def printed(shown: Run, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    terminal.show(console, shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_end_of_a_run_at_either_width(
    tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(
        tmp_path
    )  # the place is shown as seen from here, whatever the length of the whole path
    text = printed(
        run(tmp_path, {"expect": {"accuracy": ">= 0.9", "recoveries": "== 2"}}), width
    )
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
    assert "…" not in text, "a cell was cut off"
    assert ("laptop" in text) == (width >= 100)


def test_names_of_devices_are_whole_beside_long_times(tmp_path: Path) -> None:
    text = printed(
        run(tmp_path, events=recorded.slow_down(recorded.make_events(), 300.0)), 80
    )
    devices = text[text.index("Devices") : text.index("Links")]
    assert "Down" in devices
    assert {"Device", "a", "b"} <= set(devices.split())
    assert "5 min" in devices


def test_the_parts_of_a_model_that_a_failed_run_left_are_named(tmp_path: Path) -> None:
    left = dict.fromkeys(("a", "b", "c"), b"weights")
    text = printed(
        run(tmp_path, status="timed out", error="not over after 6 s", parts=left), 80
    )
    assert "weights-a.safetensors, weights-b.safetensors and 1 more" in " ".join(
        text.split()
    )


def test_reasons_against_a_run_stand_in_its_verdict(tmp_path: Path) -> None:
    text = printed(
        run(
            tmp_path, status="failed", error="a[b] died", fidelity={"host_stolen": 0.9}
        ),
        80,
    )
    assert "✘ not trusted" in text
    assert "the run failed: a[b] died" in text
    assert "a hypervisor kept 90.0%" in text


def test_what_shaped_the_links_is_named(tmp_path: Path) -> None:
    shaped = run(
        tmp_path, fidelity={"backend": "userspace", "congestion_control": "reno"}
    )
    assert "shaped by userspace, TCP with reno" in " ".join(
        printed(shaped, 100).split()
    )
    assert "shaped by userspace, TCP with reno" in html.render(shaped)


def test_a_run_in_which_nothing_happened_prints(tmp_path: Path) -> None:
    text = printed(
        run(
            tmp_path,
            events=[],
            links=[],
            fidelity={},
            status="failed",
            error="no engine",
        ),
        80,
    )
    assert "no engine" in text


def test_brackets_of_a_partition_are_not_taken_for_markup(tmp_path: Path) -> None:
    events = recorded.make_events()
    events = [
        event
        if event.event != "fault"
        else type(event)(
            event.time, event.device, "fault", {**event.fields, "target": "[a] [b]"}
        )
        for event in events
    ]
    assert "kill [a] [b]" in printed(run(tmp_path, events=events), 80)


def test_a_link_without_a_rate_of_its_own_has_that_of_its_devices() -> None:
    found = metrics(
        recorded.make_outcome(), recorded.make_trial().experiment, recorded.make_plan()
    )["links"][0]
    link = {
        **found,
        "requested": {**found["requested"], "rate": None},
        "rate_at_best": 10e6,
    }
    assert group_links([link])[0].requested.startswith("10 mbit")
    assert group_links([{**link, "rate_at_best": None}])[0].requested.startswith(
        "unlimited"
    )


def test_alike_links_stand_together_and_a_bad_one_alone() -> None:
    found = metrics(
        recorded.make_outcome(), recorded.make_trial().experiment, recorded.make_plan()
    )["links"]
    assert [group.name for group in group_links(found)] == ["a ↔ b"]
    found[1]["problem"] = "too slow"
    assert [(group.name, group.problem) for group in group_links(found)] == [
        ("b → a", "too slow"),
        ("a → b", None),
    ]
    many = [
        {**found[0], "source": "a", "destination": f"d{number}"} for number in range(5)
    ]
    assert group_links(many)[0].name == "a – d0, d1, d2, d3, d4"
    few = [
        {**found[0], "source": "a", "destination": f"d{number}"} for number in range(3)
    ]
    assert group_links(few)[0].name == "a → d0, a → d1, a → d2"
    mesh = [
        {**found[0], "source": a, "destination": b}
        for a in "abcdefgh"
        for b in "abcdefgh"
        if a != b
    ]
    assert group_links(mesh)[0].name == "all 56 among a, b, …, h"


def test_a_summary_has_a_line_a_point(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    sweep.show(
        console, summary_of([run(tmp_path / "a"), run(tmp_path / "b")]), tmp_path
    )
    assert isinstance(console.file, io.StringIO)
    assert "95 ± 0" in console.file.getvalue()


def test_a_summary_of_runs_that_are_not_trusted_tears_no_word(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    summary = summary_of([run(tmp_path / "a")])
    point = {
        **summary["points"][0],
        "point": {"workload.method.name": "federated"},
        "trusted": 0,
    }
    sweep.show(console, {**summary, "points": [point]}, tmp_path)
    assert isinstance(console.file, io.StringIO)
    assert {"method", "federated", "Runs"} <= set(console.file.getvalue().split())


def test_a_summary_with_many_figures_wraps_them(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    summary = summary_of([run(tmp_path / "a")])
    point = {
        **summary["points"][0],
        "point": {"workload.method.name": "pipelearn", "network.link.rate": "4g-plus"},
    }
    many = {
        f"wide_figure_{number}": {"kind": "seconds", "brief": True}
        for number in range(5)
    }
    point["metrics"] = {name: {"mean": 12.345, "ci95": 1.234, "n": 3} for name in many}
    sweep.show(console, {**summary, "points": [point], "metrics": many}, tmp_path)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.count("12.3") for line in lines) == 5, "all digits of all figures"
    assert "…" not in console.file.getvalue()


def test_a_summary_of_many_swept_keys_has_a_legend_of_numbered_points(
    tmp_path: Path,
) -> None:
    summary = summary_of([run(tmp_path / "a")])
    swept = {
        "workload.method.name": ("pipelearn", "split-federated"),
        "network.link.rate": ("10mbit", "100mbit"),
        "network.link.delay": ("5ms", "20ms"),
        "network.link.loss": ("0.1%", "1%"),
        "workload.batch_size": (64, 128),
        "devices.phone.speed": ("4gflops", "40gflops"),
        "workload.training.optimizer.learning_rate": (0.01, 0.001),
    }
    points = []
    for place in range(2):
        point = {key: values[place] for key, values in swept.items()}
        points.append({**summary["points"][0], "point": point})
    console = Console(file=io.StringIO(), width=80)
    sweep.show(console, {**summary, "points": points}, tmp_path)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    legend = [" ".join(line.split()) for line in lines]
    assert "2 split-federated 100mbit 20ms 1% 128 40gflops 0.001" in legend
    [metrics] = [line for line in lines if "Accuracy" in line]
    assert "Step time (s)" in metrics
    assert "Duration (s)" in metrics


def test_brackets_in_headings_are_shown() -> None:
    console = Console(file=io.StringIO(), width=80)
    section = plain_table([Column("FedAvg [paper]")], [["[bold]1"]])
    console.print(draw_section(section, 80))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "FedAvg [paper]" in shown
    assert "[bold]1" in shown


def test_tables_of_more_metrics_than_a_terminal_holds_are_divided() -> None:
    headings = [f"metric{number}" for number in range(20)]
    section = Section(
        "many", "", "", number_columns(*headings), [[Cell("12345678")] * 20]
    )
    parts = split_wide(section, "Point", 80)
    assert [part.title for part in parts] == ["many", *[""] * (len(parts) - 1)]
    shown = []
    for part in parts:
        first, *others = part.columns
        assert first.heading == "Point"
        shown += [column.heading for column in others]
    assert shown == headings
    assert split_wide(section, "Point", 300) == [section]


def test_an_inference_says_what_it_waited_for_and_what_failed(tmp_path: Path) -> None:
    events = [
        Event(1.0, "a", "request", {"request": 0, "latency": 0.99}),
        Event(2.0, "a", "failed", {"request": 1, "error": "b was lost", "after": 0.5}),
        Event(0.1, "a", "memory", {"weights": 4_000_000, "activations": 0}),
        Event(0.2, "a", "memory", {"weights": 4_000_000, "activations": 2_000_000}),
        Event(0.2, "b", "memory", {"weights": 5_000_000, "activations": 500_000}),
    ]
    workload = recorded.SCENARIO["workload"]
    inferring = {
        "task": "infer",
        "method": {"name": "distributed"},
        "model": workload["model"],
        "requests": 2,
    }
    shown = run(tmp_path, {"workload": inferring}, events=events)
    text = " ".join(printed(shown, 120).split())
    assert ", 1 failed" in text
    assert (
        "Predicted 900 ms a request, by the plan; measured over predicted: 1.1" in text
    )
    assert "of computing on the critical path of a request" in text
    assert "Memory 6 MB at most, on a: 4 MB weights, 2 MB activations" in text


def test_a_request_that_fails_is_told_at_once_with_its_reason() -> None:
    console = Console(file=io.StringIO(), width=120)
    LiveProgress(console, "run", 4, "requests").event(
        Event(2.0, "a", "failed", {"request": 1, "error": "b was lost"})
    )
    assert isinstance(console.file, io.StringIO)
    assert "2.00 s  request 1 failed: b was lost" in console.file.getvalue()


@pytest.mark.parametrize(("step", "place"), [({"step": 3}, " at step 3"), ({}, "")])
def test_recovery_without_training_steps_names_none(
    step: dict[str, int], place: str
) -> None:
    console = Console(file=io.StringIO(), width=120)
    LiveProgress(console, "run", 4, "requests").event(
        Event(2.0, "a", "recovery", {"phase": "detected", "missing": ["b"], **step})
    )
    assert isinstance(console.file, io.StringIO)
    assert f"recovery detected{place}: b silent" in console.file.getvalue()


def test_links_that_changed_by_hand_are_in_the_report(tmp_path: Path) -> None:
    worse = {"rate": 5e6, "delay": 0.02, "loss": 0.0, "up": True}
    changed = [
        Event(3.0, "testbed", "link", {"source": a, "destination": b, **worse})
        for a, b in ("ab", "ba")
    ]
    events = sorted([*recorded.make_events(), *changed], key=lambda event: event.time)
    found = run(tmp_path, events=events)
    text = printed(found, 100)
    assert "Link changes" in text
    assert ["3.00", "s", "a", "↔", "b", "5", "mbit,", "20", "ms"] in [
        line.split() for line in text.splitlines()
    ]
    assert "<h2>Link changes</h2>" in html.render(found)


def test_programs_have_no_figures_that_nobody_knows(tmp_path: Path) -> None:
    workload = {
        "task": "program",
        "programs": {"a": {"command": ["true"]}, "b": {"command": ["true"]}},
    }
    requests = [
        Event(float(number), "a", "request", {"request": number, "latency": 0.5})
        for number in range(1, 4)
    ]
    plan = Plan(
        method="program",
        coordinator="a",
        assignments=tuple(
            Assignment(device=name, start=0, stop=0, memory=0.0) for name in "ab"
        ),
    )
    folder = recorded.write_run(
        tmp_path / "run",
        recorded.make_trial(workload=workload),
        plan,
        recorded.make_outcome(events=requests),
    )
    text = printed(files.load(folder), 120)
    assert "Latency" in text
    for word in ("Weights", "Path", "Carried"):
        assert word not in text.split()


def test_metric_with_a_value_for_each_device_has_no_cell_of_its_own(
    tmp_path: Path,
) -> None:
    laps = Metric("laps", "number", "laps", lambda _: None, brief=True, compared=True)
    spec = MetricsSpec((laps,), rows=(Row("Laps", "{laps}"),))
    run = files.load(
        recorded.write_run(
            tmp_path / "run",
            recorded.make_trial(),
            recorded.make_plan(),
            recorded.make_outcome(),
        )
    )
    values = {**run.metrics, "laps": {"a": 1, "b": 2}}
    grouped = replace(run, metrics=values, declared=spec)
    console = Console(file=io.StringIO(), width=100)
    terminal.show_briefly(console, grouped)
    terminal.show(console, grouped)
    assert "laps" not in console.file.getvalue().lower()  # type: ignore[attr-defined]
    assert "laps" not in summary_of([grouped])["points"][0]["metrics"]
    compared = compare({"one": [grouped], "other": [grouped]})
    assert "laps" not in [row["name"] for row in compared["metrics"]]
