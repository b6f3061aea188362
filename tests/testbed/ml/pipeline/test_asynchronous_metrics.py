"""Tests of metrics and reports of recoveries, repartitions and weight versions in asynchronous training."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from testbed.ml.pipeline.metrics import DECLARED
from testbed.trace.events import Event
from testbed.trace.metrics import metrics
from testbed_controller.report import html, terminal
from testbed_controller.report.timeline import find_views, shaded_windows
from testbed_controller.results import files
from testbed_controller.results.run import Run
from tests.helpers import recorded

CHANGE = Event(
    2.9,
    "a",
    "repartition",
    {
        "step": 4,
        "partition": [["a", 0, 1], ["b", 1, 3], ["c", 3, 3]],
        "seconds": 0.5,
        "draining": 0.4,
    },
)


def unit_received(time: float, size: int) -> Event:
    fields = {
        "peer": "a",
        "message": "unit",
        "bytes": size,
        "start": time,
        "duration": 0.0,
    }
    return Event(time, "b", "receive", fields)


REPARTITION = [unit_received(2.85, 3_000_000), CHANGE]
VERSIONS = Event(
    5.0,
    "b",
    "versions",
    {
        "stage": 1,
        "step": 9,
        "in_use": 1,
        "kept": 3,
        "allowed": 2,
        "bytes": 6_000_000,
        "replicas": 1_000_000,
    },
)


def recovery(time: float, phase: str, **fields: Any) -> Event:
    return Event(time, "a", "recovery", {"phase": phase, "step": 1, **fields})


RECOVERY = [
    recovery(3.25, "repartitioned", case="redistribute", partition=[]),
    unit_received(3.5, 2_000_000),
    recovery(3.75, "redistributed"),
    recovery(5.0, "trained"),
]
"""Phases after the detection, which the recorded run has at 3.0 s."""


def by_time(events: list[Event]) -> list[Event]:
    # Metrics expect the events of a run in the order of their times.
    return sorted(events, key=lambda event: event.time)


def compute_metrics(*events: Event, faulty: bool = False) -> dict[str, Any]:
    """Return the metrics of the recorded run with further events."""
    trial = recorded.make_trial() if faulty else recorded.make_trial(faults=())
    all_events = by_time([*recorded.make_events(faulty), *events])
    return metrics(
        recorded.make_outcome(events=all_events),
        trial.experiment,
        recorded.make_plan(),
        DECLARED,
    )


def write_run(folder: Path, *events: Event) -> Run:
    """Write the results of the recorded run with further events, and load them."""
    workload = recorded.SCENARIO["workload"] | {"method": {"name": "ftpipehd"}}
    trial = recorded.make_trial(workload=workload)
    all_events = by_time([*recorded.make_events(), *events])
    outcome = recorded.make_outcome(events=all_events)
    run_folder = recorded.write_run(
        folder / "run", trial, recorded.make_plan(), outcome
    )
    return files.load(run_folder)


def test_durations_of_recovery_phases_are_between_recorded_events() -> None:
    values = compute_metrics(*RECOVERY, faulty=True)
    # From 3.0 to 3.25, from 3.25 to 3.75, and from 3.0 to 5.0 s.
    assert values["repartition_time"] == pytest.approx(0.25)
    assert values["redistribution_time"] == pytest.approx(0.5)
    assert values["first_batch_time"] == pytest.approx(2.0)
    assert values["recovery_bytes"] == 2_000_000
    (recorded_recovery,) = values["recovery_list"]
    assert recorded_recovery["case"] == "redistribute"
    assert recorded_recovery["moved"] == 2_000_000
    assert recorded_recovery["trained"] == 5.0


def test_recovery_without_recorded_phases_has_no_phase_metrics() -> None:
    values = compute_metrics(faulty=True)
    assert "repartition_time" not in values
    assert values["recovery_list"][0]["repartitioned"] is None
    # The recorded run has no asynchronous training.
    assert "repartitions" not in values


def test_remaining_time_is_zero_if_last_recovery_is_at_end() -> None:
    after_last_step = [recovery(8.2, "detected"), recovery(8.4, "resumed")]
    assert compute_metrics(faulty=True)["remaining_time"] > 0
    assert compute_metrics(*after_last_step, faulty=True)["remaining_time"] == 0


def test_repartition_disturbs_steps_and_is_measured_separately() -> None:
    values = compute_metrics(*REPARTITION)
    steady = [row["steady"] for row in values["series"]["steps"]]
    # The first step is never steady, and the third overlaps the repartition.
    assert steady == [False, True, False, True, True]
    assert values["step_time_after"] == pytest.approx(1.0)
    assert values["repartition_draining"] == pytest.approx(0.4)
    assert values["repartition_moving"] == pytest.approx(0.1)
    assert values["repartition_pause"] == 0.5
    assert values["repartition_bytes"] == 3_000_000


def test_timeline_shades_repartition_and_offers_view(tmp_path: Path) -> None:
    run = write_run(tmp_path, CHANGE)
    windows = []
    for window in shaded_windows(run):
        windows.append((window["label"], window["start"], window["end"]))
    assert ("repartition", 2.4, 2.9) in windows
    # A view has a second on both sides.
    views = {view["name"]: view for view in find_views(run)}
    view = views["repartition"]
    assert view["start"] == pytest.approx(1.4)
    assert view["end"] == pytest.approx(3.9)


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_report_shows_recovery_repartition_and_versions(
    tmp_path: Path, width: int
) -> None:
    file = io.StringIO()
    console = Console(file=file, width=width)
    terminal.show(console, write_run(tmp_path, *RECOVERY, *REPARTITION, VERSIONS))
    text = file.getvalue()
    for part in (
        "Redistribution",
        "a 0, b 1–2, c none",
        "2 MB",
        "500 ms",
        "400 ms",
        "Versions",
        "pause for a repart",
    ):
        assert part in text
    # Nothing is cut off; a narrow terminal omits the column of cases instead.
    assert "…" not in text
    assert ("redistribute" in text) == (width >= 100)


def test_versions_table_is_sorted_by_stretch_and_stage(tmp_path: Path) -> None:
    first_stage = Event(4.5, "a", "versions", {**VERSIONS.fields, "stage": 0})
    earlier = Event(4.0, "b", "versions", {**VERSIONS.fields, "step": 3})
    run = write_run(tmp_path, VERSIONS, first_stage, earlier)
    table = next(
        table for table in run.declared.tables if table.title.startswith("Versions")
    )
    assert callable(table.items)
    rows = [(item["step"], item["stage"]) for item in table.items(run.metrics)]
    assert rows == [(3, 1), (9, 0), (9, 1)]
    assert run.metrics["versions_kept"] == 3


def test_html_report_shows_only_sections_with_content(tmp_path: Path) -> None:
    run = write_run(tmp_path / "full", *RECOVERY, *REPARTITION, VERSIONS)
    page = html.render(run)
    for part in (
        "Recoveries",
        "redistribute",
        "Repartitions",
        "a 0, b 1–2, c none",
        "Versions of the weights",
    ):
        assert part in page
    plain_page = html.render(write_run(tmp_path / "plain"))
    for heading in ("<h2>Recoveries", "<h2>Repartitions", "<h2>Versions"):
        assert heading not in plain_page
