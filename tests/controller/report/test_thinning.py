"""Reports of runs with thousands of devices, links or rows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from testbed.plan import Assignment
from testbed.trace.metrics import metrics
from testbed_controller.report import html, terminal
from testbed_controller.report.sections import directions_section, sections
from testbed_controller.report.tables import Cell, Column, Section
from testbed_controller.report.thinning import (
    ENTRIES_KEPT,
    MAX_SHOWN,
    SELECTED_PER_MEASURE,
    abridge,
    limit_rows,
    select_notable,
)
from testbed_controller.report.timeline import shaded_windows, timeline
from testbed_controller.results.declared import metrics_spec_of_trial
from testbed_controller.results.recorder import initial_manifest
from testbed_controller.results.run import Run
from tests.helpers import recorded

MANY = 3 * MAX_SHOWN
"""Number of devices and of links of `make_crowd` by default."""


def make_crowd(devices: int = MANY, *, equal_links: bool = True) -> Run:
    """Return the recorded run with many devices: d7 computes longest, d8 was down, and d9 received most."""
    trial = recorded.make_trial()
    plan = recorded.make_plan()
    outcome = recorded.make_outcome(runtime="simulate", links=[])
    values = metrics(outcome, trial.experiment, plan)
    device = values["devices"]["a"]
    link = values["links"][0]
    names = [f"d{number}" for number in range(devices)]
    values["devices"] = {}
    for name in names:
        values["devices"][name] = {**device, "compute": 1.0, "down": 0.0}
    values["devices"]["d7"]["compute"] = 5.0
    values["devices"]["d8"]["down"] = 2.0
    values["links"] = []
    for number, name in enumerate(names):
        delay = 1.0 if equal_links else 1.0 + number
        changes = {"bytes": 10, "used_share": 0.1, "source": "d0", "destination": name}
        requested = {**link["requested"], "delay": delay}
        values["links"].append({**link, **changes, "requested": requested})
    values["links"][9]["bytes"] = 10_000_000
    assignments = []
    for name in names:
        assignments.append(Assignment(device=name, start=0, stop=1, memory=1e6))
    owned = {name: {"0": 3, "1": 4} for name in names}
    return Run(
        Path("somewhere"),
        trial,
        plan.model_copy(update={"assignments": tuple(assignments)}),
        outcome,
        {**initial_manifest(trial, "simulate", None), "owned": owned},
        values,
        metrics_spec_of_trial(trial),
    )


def print_run(run: Run, width: int = 80) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        terminal.show(console, run)
    return capture.get()


def section_of(run: Run, title: str) -> Section:
    (section,) = (section for section in sections(run) if section.title == title)
    return section


def names_of(section: Section) -> list[str]:
    return [row[0].text for row in section.rows]


def test_few_items_are_all_selected() -> None:
    items = list(range(MAX_SHOWN))
    assert select_notable(items, {"largest": float}) == [(item, "") for item in items]


def test_notable_items_are_selected_once_with_all_reasons() -> None:
    items = list(range(MAX_SHOWN + 1))
    measures = {
        "even": lambda item: item % 2 == 0,
        "largest": float,
        "nothing": lambda _: 0.0,
    }
    selected = dict(select_notable(items, measures))
    # Of equal items the first ones: 0, 2, 4, ...
    assert (
        list(selected)[:SELECTED_PER_MEASURE] == items[: 2 * SELECTED_PER_MEASURE : 2]
    )
    assert (
        sorted(list(selected)[SELECTED_PER_MEASURE:]) == items[-SELECTED_PER_MEASURE:]
    )
    assert selected[0] == "even"
    assert selected[MAX_SHOWN] == "largest"
    same_item = {"even": lambda item: item == 5, "odd": lambda item: item == 5}
    assert dict(select_notable(items, same_item)) == {5: "even, odd"}


def test_table_of_many_devices_has_total_and_notable_devices() -> None:
    run = make_crowd()
    table = section_of(run, "Devices")
    reasons = {row[0].text: row[1].text for row in table.rows}
    assert list(reasons)[:2] == [f"all {MANY:,}", "d8"]
    assert reasons["d8"].startswith("longest down")
    assert "computes longest" in reasons["d7"]
    # The row of all devices is not one of them.
    assert len(reasons) - 1 + table.omitted_rows == MANY
    headings = [column.heading for column in table.columns]
    # 1,199 devices compute for 1 s and d7 for 5 s: 1,204 s.
    assert table.rows[0][headings.index("Compute")].text == "20 min 4 s"
    assert set(timeline(run)["devices"]) <= set(reasons)


def test_few_devices_are_all_in_their_table() -> None:
    table = section_of(make_crowd(MAX_SHOWN), "Devices")
    assert len(table.rows) == MAX_SHOWN
    assert table.omitted_rows == 0
    # Instead of the reason of the selection.
    assert table.columns[1].heading == "Profile"


def test_links_with_most_traffic_are_shown_if_all_links_are_equal() -> None:
    table = directions_section(make_crowd(equal_links=True))
    assert table is not None
    assert table.rows[0][1].text == "d9"
    assert table.rows[0][2].text == "carried most, used most"
    assert len(table.rows) + table.omitted_rows == MANY


def test_links_with_most_traffic_are_shown_if_links_differ() -> None:
    run = make_crowd(equal_links=False)
    # The table of links has their traffic already.
    assert directions_section(run) is None
    table = section_of(run, "Links")
    assert names_of(table)[:2] == [f"all {MANY:,}", "d0 → d9"]
    assert table.rows[0][3].text == "10 MB"
    assert len(table.rows) - 1 + table.omitted_rows == MANY


def test_page_of_many_devices_is_small_and_counts_omitted_items() -> None:
    page = html.render(make_crowd())
    small = html.render(make_crowd(10))
    # 120 times as many devices.
    assert len(page) < 3 * len(small)
    assert re.search(
        r"1,1\d\d more are omitted; <code>metrics.json</code> beside this file has all",
        page,
    )
    assert "more devices are omitted; manifest.json has all" in page
    assert f"{MANY - ENTRIES_KEPT:,} more are in plan.json" in page
    assert "Notable directions" in page
    # A page with all devices needs neither notes nor reasons.
    for part in ("are omitted", "Notable directions", "Why shown"):
        assert part not in small


def test_terminal_shows_few_rows_of_many_devices() -> None:
    text = print_run(make_crowd(equal_links=False))
    assert len(text.splitlines()) < 120
    omitted = r"and (?:\d+ more in the report, )?1,1\d\d more in metrics.json"
    # One note below the devices and one below the links.
    assert len(re.findall(omitted, text)) == 2


def test_long_table_is_shortened_to_first_or_last_rows() -> None:
    rows = [[Cell(str(number))] for number in range(MAX_SHOWN + 5)]
    table = Section("Rounds", "", "", (Column("Round"),), rows)
    first = limit_rows(table)
    assert names_of(first)[0] == "0"
    assert len(first.rows) == MAX_SHOWN
    assert first.omitted_rows == 5
    # A negative number stands for the last rows.
    last = limit_rows(replace(table, max_printed_rows=-12))
    assert names_of(last)[-1] == str(MAX_SHOWN + 4)
    assert len(last.rows) == MAX_SHOWN
    assert last.omitted_rows == 5
    assert limit_rows(replace(table, rows=rows[:MAX_SHOWN])).rows == rows[:MAX_SHOWN]


def test_only_long_lists_of_plan_are_abridged() -> None:
    plan: dict[str, Any] = {
        "cuts": [1, 2],
        "of": {"a": {"units": list(range(MAX_SHOWN))}},
    }
    assert json.dumps(abridge(plan, "plan.json")) == json.dumps(plan)
    many = {str(number): number for number in range(MAX_SHOWN + 1)}
    note = f"{MAX_SHOWN + 1 - ENTRIES_KEPT} more are in plan.json"
    first = dict(list(many.items())[:ENTRIES_KEPT])
    assert abridge({"of": [many]}, "plan.json") == {"of": [{**first, "...": note}]}
    assert abridge(list(many), "plan.json") == [*first, f"... {note}"]


def test_overlapping_windows_of_many_faults_are_merged() -> None:
    run = make_crowd()
    (fault,) = run.metrics["fault_list"]
    faults = []
    for number in range(MAX_SHOWN):
        faults.append({**fault, "struck": 0.001 * number, "undone": 2.0})
    faults.append({**fault, "struck": 4.0, "undone": 5.0})
    run.metrics["fault_list"] = faults
    windows = []
    for window in shaded_windows(run):
        if window["style"] == "fault":
            windows.append((window["start"], window["end"], window["label"]))
    assert windows == [(0.0, 2.0, f"{MAX_SHOWN} times a fault"), (4.0, 5.0, "kill b")]
