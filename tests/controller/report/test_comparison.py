"""Comparison of runs: ratios, warnings, clocks, and the comparison page."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from testbed.scenario.expand import repetition_seed
from testbed.trace.events import Event
from testbed.trace.metrics_spec import Metric, MetricsSpec
from testbed_controller.report import drawing
from testbed_controller.report.comparison import metrics_of, plots, render, show
from testbed_controller.report.tables import Column, VisibleConsole, latex, plain_table
from testbed_controller.results import files
from testbed_controller.results.comparison import compare, side_by_side
from testbed_controller.results.run import Run
from tests.controller.report.recorded_runs import load_recorded, text_of
from tests.helpers import recorded

RENO = {"congestion_control": "reno"}


def compare_runs(runs: list[Run]) -> dict[str, Any]:
    return compare(side_by_side(runs))


def load_simulated(folder: Path) -> Run:
    # A simulation measures neither links nor the host.
    return load_recorded(folder, runtime="simulate", links=[], fidelity={})


def load_slowed(folder: Path, factor: float) -> Run:
    events = recorded.slow_down(recorded.make_events(), factor)
    return load_recorded(folder, events=events)


def row_of(compared: dict[str, Any], metric: str) -> dict[str, Any]:
    rows = {row["name"]: row for row in compared["metrics"]}
    row: dict[str, Any] = rows[metric]
    return row


def test_ratios_are_relative_to_first_run(tmp_path: Path) -> None:
    runs = [load_recorded(tmp_path / "a"), load_slowed(tmp_path / "b", 2.0)]
    compared = compare_runs(runs)
    step_time = row_of(compared, "step_time")
    assert step_time["values"] == pytest.approx([1.0, 2.0])
    assert step_time["ratios"] == pytest.approx([1.0, 2.0])
    assert row_of(compared, "recovery_time")["ratios"][1] == pytest.approx(2.0)
    assert compared["differences"] == {}
    [warning] = compared["warnings"]
    # The messages of b took twice as long as its links need.
    assert warning.startswith("b is not trusted: the host added")
    # Device a computes for 2.6 of 8.6 seconds.
    assert compared["devices"]["a"][0]["compute"] == pytest.approx(2.6 / 8.6)


def test_different_processors_and_kernels_are_named(tmp_path: Path) -> None:
    runs = []
    for instructions in ("AVX512", "AVX2"):
        processor = {
            "processor": "EPYC",
            "instruction_set": instructions,
            "torch": "2.13.0",
        }
        # A device without torch records null.
        host = {"backend": "userspace", "computing": [None, processor]}
        runs.append(load_recorded(tmp_path / instructions, host=host))
    [warning] = compare_runs(runs)["warnings"]
    assert "EPYC (AVX2, torch 2.13.0) | EPYC (AVX512, torch 2.13.0)" in warning


def test_differences_outside_sweep_are_warned_of(tmp_path: Path) -> None:
    changes = {"seed": 4, "network": {"link": {"rate": "9mbit", "delay": "10ms"}}}
    runs = [
        load_recorded(tmp_path / "a"),
        load_recorded(tmp_path / "b", changes),
    ]
    assert compare_runs(runs)["warnings"] == [
        "the scenarios differ in seed: 3 | 4",
        "the scenarios differ in network.link.rate: 8mbit | 9mbit",
    ]
    swept = []
    for repetition, run in enumerate(runs):
        point = {"network.link.rate": "x"}
        trial = replace(run.trial, point=point, repetition=repetition)
        swept.append(replace(run, trial=trial))
    assert compare_runs(swept)["warnings"] == []


def test_repetitions_hide_no_difference_between_seeds_of_scenarios(
    tmp_path: Path,
) -> None:
    def write_repetitions(name: str, seed: int) -> list[Run]:
        runs = []
        for repetition in range(2):
            folder = tmp_path / name / str(repetition)
            run = load_recorded(folder, {"seed": repetition_seed(seed, repetition)})
            trial = replace(run.trial, repetition=repetition)
            runs.append(replace(run, trial=trial))
        return runs

    same = [*write_repetitions("a", 3), *write_repetitions("b", 3)]
    assert compare_runs(same)["warnings"] == []
    # Some repetitions of one scenario, each as a column of its own.
    assert compare({"1": same[:1], "2": same[1:2]})["warnings"] == []
    assert compare({"2": same[1:2]})["warnings"] == []
    other = [*write_repetitions("c", 3), *write_repetitions("d", 9)]
    assert compare_runs(other)["warnings"] == ["the scenarios differ in seed: 3 | 9"]


def test_names_of_compared_scenarios_may_differ(tmp_path: Path) -> None:
    runs = [
        load_recorded(tmp_path / "a"),
        load_recorded(tmp_path / "b", {"name": "other"}),
    ]
    compared = compare_runs(runs)
    assert compared["warnings"] == []
    assert compared["differences"] == {"name": ["recorded", "other"]}


@pytest.mark.parametrize(
    ("values", "ratios"),
    [
        (["relu", "tanh"], [None, None]),
        ([True, False], [None, None]),
        ([2.0, "none"], [1.0, None]),
        # Zero is no reference.
        ([0, 3], [None, None]),
    ],
)
def test_values_that_are_not_numbers_have_no_ratio(
    values: list[object], ratios: list[float | None], tmp_path: Path
) -> None:
    metric = Metric("kind", "text", "any value", lambda _: None, compared=True)
    spec = MetricsSpec((metric,))
    runs = []
    for number, value in enumerate(values):
        run = load_recorded(tmp_path / str(number))
        metrics = {**run.metrics, "kind": value}
        runs.append(replace(run, metrics=metrics, declared=spec))
    compared = compare_runs(runs)
    row = row_of(compared, "kind")
    assert row["values"] == values
    assert row["ratios"] == ratios
    assert metrics_of(compared).rows


def test_another_congestion_control_is_warned_of(tmp_path: Path) -> None:
    runs = [
        load_recorded(tmp_path / "a", fidelity=RENO),
        load_recorded(tmp_path / "b", fidelity=RENO),
        load_simulated(tmp_path / "c"),
    ]
    assert compare_runs(runs)["warnings"] == []
    # Runs of earlier releases used the host's congestion control and did not record which.
    runs.append(load_recorded(tmp_path / "d", fidelity={}))
    [warning] = compare_runs(runs)["warnings"]
    assert "congestion control" in warning


def test_emulation_and_simulation_of_one_scenario_are_compared(tmp_path: Path) -> None:
    emulated = load_slowed(tmp_path / "a", 1.05)
    simulated = load_simulated(tmp_path / "b")
    clocks = compare_runs([emulated, simulated])["clocks"]
    assert clocks["ratio"] == pytest.approx(1.05)
    assert clocks["agree"]
    assert compare_runs([emulated, emulated])["clocks"] is None
    slower = load_slowed(tmp_path / "c", 1.2)
    assert not compare_runs([slower, simulated])["clocks"]["agree"]
    other = load_recorded(tmp_path / "d", {"seed": 9}, runtime="simulate")
    assert compare_runs([emulated, other])["clocks"] is None


def test_page_has_charts_of_accuracy_and_of_steps_around_fault(tmp_path: Path) -> None:
    evaluation = Event(1.5, "a", "evaluate", {"step": 1, "accuracy": 0.5, "loss": 1.0})
    events = [*recorded.make_events(), evaluation]
    events.sort(key=lambda event: event.time)
    first = load_recorded(tmp_path / "a", events=events)
    second = load_recorded(tmp_path / "b", events=events)
    grouped = side_by_side([first, second])
    page = render(grouped, compare(grouped))
    axes = {}
    for title, _, plot in plots(grouped):
        assert f'aria-label="{title}"' in page
        axes[title] = drawing.draw(plot).axes[0]
    accuracy = axes["Accuracy over time"].lines[0].get_xydata().tolist()
    assert accuracy == [[1.5, 50.0], [8.5, 95.0]]
    around_fault = axes["Time per step around the fault"]
    assert around_fault.get_xlabel() == "step"
    # Step 1 is repeated after the outage and ends 3 s after the step before it.
    times = around_fault.lines[1].get_xydata().tolist()
    assert times[:2] == [[0.0, 1.0], [1.0, 3.0]]


def test_page_of_runs_without_faults_has_no_chart_around_faults(tmp_path: Path) -> None:
    events = recorded.make_events(faulty=False)
    runs = []
    for name in ("c", "d"):
        runs.append(load_recorded(tmp_path / name, {"faults": ()}, events=events))
    grouped = side_by_side(runs)
    page = render(grouped, compare(grouped))
    assert "around the fault" not in page
    # A single evaluation makes no curve.
    assert 'aria-label="Accuracy over time"' not in page


def test_all_columns_fit_narrow_terminal(tmp_path: Path) -> None:
    for index in range(6):
        # As folders of a sweep are named.
        load_recorded(tmp_path / f"sweep,method.schedule=1f1b,rate={index}mbit,loss=1%")
    runs = [files.load_metrics(folder) for folder in files.run_folders(tmp_path)]
    console = Console(file=io.StringIO(), width=80)
    show(console, compare_runs(runs))
    lines = text_of(console).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.count("rate=") for line in lines) == 6
    # Keys with the same value in all runs are omitted.
    assert "schedule" not in text_of(console)
    assert "loss=" not in text_of(console)


def test_note_counts_series_beyond_limit(tmp_path: Path) -> None:
    run = load_recorded(tmp_path / "a")
    grouped = {str(number): [run] for number in range(20)}
    _, note, plot = next(iter(plots(grouped)))
    # Six colours in three line styles.
    assert note == "2 more are not drawn: select with --series."
    assert len(drawing.draw(plot).axes[0].lines) == 18


def test_latex_tables_are_ascii(tmp_path: Path) -> None:
    # Without packages, pdflatex refuses other characters.
    runs = [load_recorded(tmp_path / "a"), load_simulated(tmp_path / "b")]
    table = latex(metrics_of(compare_runs(runs)))
    assert "simulated" in table
    assert table.isascii()


def test_latex_tables_mark_characters_unknown_to_pdflatex() -> None:
    section = plain_table([Column("α")], [["−5 °C"], ["3 m²"], ["Ħa"], ["日"]])
    rows = [line for line in latex(section).splitlines() if line.endswith(r"\\")]
    assert rows == [
        r"? \\",
        r"$-$5 \textdegree{}C \\",
        r"3 m\textsuperscript{2} \\",
        r"Ha \\",
        r"? \\",
    ]


def test_headings_show_no_escaped_spaces(tmp_path: Path) -> None:
    runs = [load_recorded(tmp_path / "a"), load_simulated(tmp_path / "b")]
    console = VisibleConsole(file=io.StringIO(), width=100)
    show(console, compare_runs(runs))
    assert "\\x" not in text_of(console)
