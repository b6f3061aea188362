"""Tables in the terminal: groups of equal links, summaries of sweeps, and tables wider than the terminal."""

from __future__ import annotations

import io
from itertools import permutations
from pathlib import Path
from typing import Any

from rich.console import Console

from testbed.trace import metrics as trace_metrics
from testbed_controller.report import sweep
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
from testbed_controller.results.run import Run
from testbed_controller.results.summary import summary_of
from tests.controller.report.recorded_runs import load_recorded, text_of
from tests.helpers import recorded


def make_links() -> list[dict[str, Any]]:
    """Return the metrics of both links of the recorded run."""
    experiment = recorded.make_trial().experiment
    outcome = recorded.make_outcome()
    values = trace_metrics.metrics(outcome, experiment, recorded.make_plan())
    links: list[dict[str, Any]] = values["links"]
    return links


def copy_link(link: dict[str, Any], source: str, destination: str) -> dict[str, Any]:
    return {**link, "source": source, "destination": destination}


def summarize_run(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the summary of one run, and the only point of the summary."""
    summary = summary_of([run])
    [point] = summary["points"]
    return summary, point


def print_summary(summary: dict[str, Any], folder: Path, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    sweep.show(console, summary, folder)
    return text_of(console)


def test_link_without_rate_shows_rate_of_its_devices() -> None:
    link = make_links()[0]
    link["requested"] = {**link["requested"], "rate": None}
    (group,) = group_links([{**link, "rate_at_best": 10e6}])
    assert group.requested.startswith("10 mbit")
    (group,) = group_links([{**link, "rate_at_best": None}])
    assert group.requested.startswith("unlimited")


def test_links_with_problem_are_shown_apart_from_equal_links() -> None:
    links = make_links()
    (group,) = group_links(links)
    assert group.name == "a ↔ b"
    links[1]["problem"] = "too slow"
    # Problems come first.
    first, second = group_links(links)
    assert first.name == "b → a"
    assert first.problem == "too slow"
    assert second.name == "a → b"
    assert second.problem is None


def test_equal_links_are_named_by_their_common_device_or_number() -> None:
    link = make_links()[0]
    star = []
    for name in ("d0", "d1", "d2", "d3", "d4"):
        star.append(copy_link(link, "a", name))
    assert group_links(star)[0].name == "a – d0, d1, d2, d3, d4"
    assert group_links(star[:3])[0].name == "a → d0, a → d1, a → d2"
    mesh = []
    for source, destination in permutations("abcdefgh", 2):
        mesh.append(copy_link(link, source, destination))
    # Eight devices have 8 · 7 directed links.
    assert group_links(mesh)[0].name == "all 56 among a, b, …, h"


def test_summary_has_line_for_each_point(tmp_path: Path) -> None:
    runs = [load_recorded(tmp_path / "a"), load_recorded(tmp_path / "b")]
    # Both runs have an accuracy of 95 %.
    assert "95 ± 0" in print_summary(summary_of(runs), tmp_path, width=100)


def test_words_are_complete_in_summary_of_untrusted_runs(tmp_path: Path) -> None:
    summary, point = summarize_run(load_recorded(tmp_path / "a"))
    point["point"] = {"workload.method.name": "federated"}
    point["trusted"] = 0
    text = print_summary(summary, tmp_path)
    assert {"method", "federated", "Runs"} <= set(text.split())


def test_summary_of_many_metrics_is_wrapped(tmp_path: Path) -> None:
    summary, point = summarize_run(load_recorded(tmp_path / "a"))
    point["point"] = {
        "workload.method.name": "pipelearn",
        "network.link.rate": "4g-plus",
    }
    summary["metrics"] = {}
    point["metrics"] = {}
    for number in range(5):
        name = f"wide_metric_{number}"
        summary["metrics"][name] = {"kind": "seconds", "brief": True}
        point["metrics"][name] = {"mean": 12.345, "ci95": 1.234, "n": 3}
    text = print_summary(summary, tmp_path)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    # Values of all five metrics, with all digits.
    assert sum(line.count("12.3") for line in lines) == 5
    assert "…" not in text


def test_summary_of_many_swept_keys_has_legend_of_numbered_points(
    tmp_path: Path,
) -> None:
    summary, point = summarize_run(load_recorded(tmp_path / "a"))
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
    for index in range(2):
        values = {key: choices[index] for key, choices in swept.items()}
        points.append({**point, "point": values})
    lines = print_summary({**summary, "points": points}, tmp_path).splitlines()
    assert max(map(len, lines)) <= 80
    legend = [line.split() for line in lines]
    second_point = "2 split-federated 100mbit 20ms 1% 128 40gflops 0.001"
    assert second_point.split() in legend
    # With numbers in place of values, all metrics fit into one table.
    (heading,) = (line for line in lines if "Accuracy" in line)
    assert "Step time (s)" in heading
    assert "Duration (s)" in heading


def test_brackets_in_tables_are_shown() -> None:
    console = Console(file=io.StringIO(), width=80)
    # rich would read [bold] as markup.
    section = plain_table([Column("FedAvg [paper]")], [["[bold]1"]])
    console.print(draw_section(section, 80))
    text = text_of(console)
    assert "FedAvg [paper]" in text
    assert "[bold]1" in text


def test_tables_wider_than_terminal_are_divided() -> None:
    headings = [f"metric{number}" for number in range(20)]
    columns = number_columns(*headings)
    section = Section("many", "", "", columns, [[Cell("12345678")] * 20])
    parts = split_wide(section, "Point", 80)
    first_part, *other_parts = parts
    assert first_part.title == "many"
    for part in other_parts:
        assert part.title == ""
    divided = []
    for part in parts:
        point, *metrics = part.columns
        assert point.heading == "Point"
        divided += [column.heading for column in metrics]
    assert divided == headings
    assert split_wide(section, "Point", 300) == [section]
