"""What runs of asynchronous training tell of recoveries, repartitions and versions, and where they tell nothing."""

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
from testbed_controller.report.timeline import interesting, shaded
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


def received(time: float, size: int) -> Event:
    fields = {
        "peer": "a",
        "message": "unit",
        "bytes": size,
        "start": time,
        "duration": 0.0,
    }
    return Event(time, "b", "receive", fields)


CHANGED = [received(2.85, 3_000_000), CHANGE]
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


PHASES = [
    recovery(3.25, "repartitioned", case="redistribute", partition=[]),
    received(3.5, 2_000_000),
    recovery(3.75, "redistributed"),
    recovery(5.0, "trained"),
]


def figures(*events: Event, faulty: bool = False) -> dict[str, Any]:
    trial = recorded.make_trial(**({} if faulty else {"faults": ()}))
    ordered = sorted(
        [*recorded.make_events(faulty), *events], key=lambda event: event.time
    )
    return metrics(
        recorded.make_outcome(events=ordered),
        trial.experiment,
        recorded.make_plan(),
        DECLARED,
    )


def told(folder: Path, *events: Event) -> Run:
    trial = recorded.make_trial(
        workload=recorded.SCENARIO["workload"] | {"method": {"name": "ftpipehd"}}
    )
    ordered = sorted([*recorded.make_events(), *events], key=lambda event: event.time)
    return files.load(
        recorded.write_run(
            folder / "run",
            trial,
            recorded.make_plan(),
            recorded.make_outcome(events=ordered),
        )
    )


def test_the_phases_of_a_recovery_are_between_what_the_method_tells() -> None:
    found = figures(*PHASES, faulty=True)
    assert found["repartition_time"] == pytest.approx(0.25)
    assert found["redistribution_time"] == pytest.approx(0.5)
    assert found["first_batch_time"] == pytest.approx(2.0)
    assert found["recovery_bytes"] == 2_000_000
    (item,) = found["recovery_list"]
    assert (item["case"], item["moved"], item["trained"]) == (
        "redistribute",
        2_000_000,
        5.0,
    )


def test_a_recovery_that_tells_of_no_phases_has_none() -> None:
    found = figures(faulty=True)
    assert "repartition_time" not in found
    assert found["recovery_list"][0]["repartitioned"] is None
    assert "repartitions" not in found, "nothing was trained asynchronously"


def test_nothing_was_trained_after_a_recovery_that_came_last() -> None:
    after = [recovery(8.2, "detected"), recovery(8.4, "resumed")]
    assert figures(faulty=True)["remaining_time"] > 0
    assert figures(*after, faulty=True)["remaining_time"] == 0


def test_a_repartition_disturbs() -> None:
    found = figures(*CHANGED)
    assert [row["steady"] for row in found["series"]["steps"]] == [
        False,
        True,
        False,
        True,
        True,
    ]
    assert found["step_time_after"] == pytest.approx(1.0)
    assert (
        found["repartition_draining"],
        found["repartition_moving"],
    ) == pytest.approx((0.4, 0.1))
    assert (found["repartition_pause"], found["repartition_bytes"]) == (0.5, 3_000_000)


def test_a_repartition_is_shaded_and_has_a_view(tmp_path: Path) -> None:
    run = told(tmp_path, CHANGE)
    assert ("repartition", 2.4, 2.9) in [
        (window["label"], window["start"], window["end"]) for window in shaded(run)
    ]
    assert ("repartition", 1.4, 3.9) in [
        (view["name"], pytest.approx(view["start"]), pytest.approx(view["end"]))
        for view in interesting(run)
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_shows_them(tmp_path: Path, width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    terminal.show(console, told(tmp_path, *PHASES, *CHANGED, VERSIONS))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
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
    assert "…" not in text
    assert ("redistribute" in text) == (width >= 100)


def test_versions_stand_stretch_by_stretch_and_stage_by_stage(tmp_path: Path) -> None:
    first = Event(4.5, "a", "versions", {**VERSIONS.fields, "stage": 0})
    earlier = Event(4.0, "b", "versions", {**VERSIONS.fields, "step": 3})
    run = told(tmp_path, VERSIONS, first, earlier)
    table = next(
        table for table in run.declared.tables if table.title.startswith("Versions")
    )
    assert callable(table.items)
    assert [(item["step"], item["stage"]) for item in table.items(run.metrics)] == [
        (3, 1),
        (9, 0),
        (9, 1),
    ]
    assert run.metrics["versions_kept"] == 3


def test_the_page_shows_them_and_leaves_out_what_there_is_not(tmp_path: Path) -> None:
    page = html.render(told(tmp_path / "full", *PHASES, *CHANGED, VERSIONS))
    for part in (
        "Recoveries",
        "redistribute",
        "Repartitions",
        "a 0, b 1–2, c none",
        "Versions of the weights",
    ):
        assert part in page
    plain = html.render(told(tmp_path / "plain"))
    assert all(
        part not in plain
        for part in ("<h2>Recoveries", "<h2>Repartitions", "<h2>Versions")
    )
