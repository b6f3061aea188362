"""What the report of a run tells of recoveries, repartitions and versions: the spans, and where nothing is told."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import recorded
from rich.console import Console

from controller.report import html, phases, terminal
from controller.report.timeline import fault_windows, interesting
from controller.results import files
from controller.results.run import Run
from testbed.trace.metrics import metrics

RECOVERY = {"struck": 1.0, "detected": 3.0, "resumed": 3.75, "step": 7, "missing": ["b"], "seconds": 2.75}
PHASES = {"repartitioned": 3.25, "redistributed": 3.75, "trained": 5.0, "moved": 2e6, "case": "redistribute"}
CHANGE = {
    "time": 2.0,
    "step": 4,
    "partition": [["a", 0, 1], ["b", 1, 3], ["c", 3, 3]],
    "seconds": 0.5,
    "draining": 0.4,
    "bytes": 3e6,
}
VERSIONS = {"device": "b", "stage": 1, "step": 9, "in_use": 1, "kept": 3, "allowed": 2, "bytes": 6e6, "replicas": 1e6}


def told(folder: Path, **tables: Any) -> Run:
    """Return the recorded run, with these tables and figures in its metrics."""
    path = files.write(folder / "run", recorded.trial(), recorded.plan(), recorded.outcome(), command="x")
    run = files.load(path)
    return replace(run, metrics=metrics(run.outcome, run.experiment, run.plan) | tables)


def test_phases_are_the_spans_between_what_the_method_told() -> None:
    (row,) = phases.phases({"recovery_list": [RECOVERY | PHASES]})
    assert (row.detection, row.repartition, row.redistribution, row.first_batch) == (2.0, 0.25, 0.5, 2.0)
    assert (row.missing, row.case, row.step, row.moved) == ("b", "redistribute", 7, 2e6)
    (cut,) = phases.phases({"recovery_list": [RECOVERY | {"struck": None, "repartitioned": 3.25}]})
    assert (cut.detection, cut.repartition, cut.redistribution, cut.first_batch) == (None, 0.25, None, None)
    assert not list(phases.phases({"recovery_list": [RECOVERY]}))


def test_a_repartition_names_the_units_of_every_device() -> None:
    (row,) = phases.changes({"repartition_list": [CHANGE]})
    assert row.partition == "a 0, b 1–2, c none"
    assert (row.time, row.step, row.pause, row.draining, row.moved) == (2.0, 4, 0.5, 0.4, 3e6)


def test_versions_stand_stretch_by_stretch() -> None:
    rows = [VERSIONS, VERSIONS | {"stage": 0, "device": "a"}, VERSIONS | {"step": 3}]
    found = phases.kept({"version_list": rows})
    assert [(row.until, row.stage) for row in found] == [(3, 1), (9, 0), (9, 1)]


def test_a_repartition_is_shaded_and_has_a_view() -> None:
    steps: dict[str, Any] = {"steps": [], "requests": []}
    shown = {"duration": 9.0, "fault_list": [], "recovery_list": [], "repartition_list": [CHANGE], "series": steps}
    assert [(window["start"], window["end"]) for window in fault_windows(shown)] == [(1.5, 2.0)]
    assert [(view["start"], view["end"]) for view in interesting(shown)] == [(0.0, 9.0), (0.5, 3.0)]


def test_terminal_and_page_show_them_and_leave_out_what_there_is_not(tmp_path: Path) -> None:
    tables = {"recovery_list": [RECOVERY | PHASES], "repartition_list": [CHANGE], "version_list": [VERSIONS]}
    figures = {
        "versions_kept": 3,
        "repartitions": 1,
        "repartition_pause": 0.5,
        "repartition_draining": 0.4,
        "busiest_share": 0.97,
    }
    shown = told(tmp_path / "full", **tables, **figures)
    for width in (80, 120):
        console = Console(file=io.StringIO(), width=width)
        terminal.show(console, shown)
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        for part in ("Redistribution", "a 0, b 1–2, c none", "2 MB", "1 b", "97.0%", "500 ms", "400 ms"):
            assert part in text
        assert "…" not in text
    page = html.render(shown)
    for part in (
        "Recoveries",
        "redistribute",
        "Repartitions",
        "a 0, b 1–2, c none",
        "Versions of the weights",
        "97.0%",
    ):
        assert part in page
    plain = html.render(told(tmp_path / "plain"))
    assert all(part not in plain for part in ("<h2>Recoveries", "<h2>Repartitions", "<h2>Versions"))
