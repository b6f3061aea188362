"""Pages of runs of very many devices, links or rows."""

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
from testbed_controller.report.sections import directions, sections
from testbed_controller.report.tables import Cell, Column, Section
from testbed_controller.report.thinning import (
    EACH,
    MOST,
    abridged,
    shortened,
    standing_out,
)
from testbed_controller.report.timeline import shaded, timeline
from testbed_controller.results.declared import declared_by
from testbed_controller.results.recorder import manifest
from testbed_controller.results.run import Run
from tests.helpers import recorded

MANY = 3 * MOST
"""Devices of `crowd`, and links."""


def crowd(devices: int = MANY, *, unlike: bool = False) -> Run:
    """The recorded run with many devices, of which d7 computes longest, d8 was down, and d9 was sent most."""
    trial, plan, outcome = (
        recorded.make_trial(),
        recorded.make_plan(),
        recorded.make_outcome(runtime="simulate", links=[]),
    )
    found = metrics(outcome, trial.experiment, plan)
    a, link = found["devices"]["a"], found["links"][0]
    names = [f"d{number}" for number in range(devices)]
    found["devices"] = {name: {**a, "compute": 1.0, "down": 0.0} for name in names}
    found["devices"]["d7"]["compute"] = 5.0
    found["devices"]["d8"]["down"] = 2.0
    asked = [
        {**link["requested"], "delay": 1.0 + number * unlike}
        for number in range(devices)
    ]
    found["links"] = [
        {
            **link,
            "source": "d0",
            "destination": name,
            "requested": each,
            "bytes": 10,
            "used_share": 0.1,
        }
        for name, each in zip(names, asked, strict=True)
    ]
    found["links"][9]["bytes"] = 10_000_000
    assignments = tuple(
        Assignment(device=name, start=0, stop=1, memory=1e6) for name in names
    )
    owned = {name: {"0": 3, "1": 4} for name in names}
    facts = {**manifest(trial, "simulate", None), "owned": owned}
    crowded = plan.model_copy(update={"assignments": assignments})
    return Run(
        Path("somewhere"), trial, crowded, outcome, facts, found, declared_by(trial)
    )


def printed(run: Run, width: int = 80) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        terminal.show(console, run)
    return capture.get()


def names_of(section: Section) -> list[str]:
    return [row[0].text for row in section.rows]


def test_few_are_all_shown() -> None:
    items = list(range(MOST))
    assert standing_out(items, {"largest": float}) == [(item, "") for item in items]


def test_of_many_those_are_shown_that_stand_out_each_once_with_all_it_stands_out_by() -> (
    None
):
    items = list(range(MOST + 1))
    found = dict(
        standing_out(
            items,
            {
                "even": lambda item: item % 2 == 0,
                "largest": float,
                "nothing": lambda _: 0.0,
            },
        )
    )
    assert list(found)[:EACH] == items[: 2 * EACH : 2], "of alike ones the first"
    assert sorted(list(found)[EACH:]) == items[-EACH:]
    assert (found[0], found[MOST]) == ("even", "largest")
    assert dict(
        standing_out(
            items, {"even": lambda item: item == 5, "odd": lambda item: item == 5}
        )
    ) == {5: "even, odd"}


def test_the_table_of_many_devices_has_all_together_and_those_that_stand_out() -> None:
    run = crowd()
    (table,) = (section for section in sections(run) if section.title == "Devices")
    shown = {row[0].text: row[1].text for row in table.rows}
    assert list(shown)[:2] == [f"all {MANY:,}", "d8"]
    assert shown["d8"].startswith("longest down")
    assert "computes longest" in shown["d7"]
    assert len(shown) - 1 + table.omitted_rows == MANY
    compute = table.rows[0][
        [column.heading for column in table.columns].index("Compute")
    ]
    assert compute.text == "20 min 4 s"
    assert [bar for bar in timeline(run)["devices"] if bar not in shown] == []


def test_few_devices_are_all_in_their_table() -> None:
    (table,) = (
        section for section in sections(crowd(MOST)) if section.title == "Devices"
    )
    assert (len(table.rows), table.omitted_rows, table.columns[1].heading) == (
        MOST,
        0,
        "Profile",
    )


def test_links_that_carried_most_are_shown_whether_or_not_all_are_alike() -> None:
    alike, unlike = crowd(), crowd(unlike=True)
    table = directions(alike)
    assert table is not None
    assert (table.rows[0][1].text, table.rows[0][2].text) == (
        "d9",
        "carried most, used most",
    )
    assert len(table.rows) + table.omitted_rows == MANY
    assert directions(unlike) is None
    (links,) = (section for section in sections(unlike) if section.title == "Links")
    assert names_of(links)[:2] == [f"all {MANY:,}", "d0 → d9"]
    assert links.rows[0][3].text == "10 MB"
    assert len(links.rows) - 1 + links.omitted_rows == MANY


def test_the_page_of_many_devices_is_small_and_says_what_it_leaves_out() -> None:
    page, small = html.render(crowd()), html.render(crowd(10))
    assert len(page) < 3 * len(small)
    assert re.search(
        r"1,1\d\d more are omitted; <code>metrics.json</code> beside this file has all",
        page,
    )
    assert "more devices are omitted; manifest.json has all" in page
    assert f"{MANY - EACH:,} more are in plan.json" in page
    assert "Notable directions" in page
    for part in ("left out", "stand out", "Shown for"):
        assert part not in small


def test_the_terminal_has_few_rows_of_many_devices() -> None:
    text = printed(crowd(unlike=True))
    assert len(text.splitlines()) < 120
    assert (
        len(
            re.findall(
                r"and (?:\d+ more in the report, )?1,1\d\d more in metrics.json", text
            )
        )
        == 2
    )


def test_a_long_table_has_its_first_rows_or_its_last_where_these_matter() -> None:
    rows = [[Cell(str(number))] for number in range(MOST + 5)]
    table = Section("Rounds", "", "", (Column("Round"),), rows)
    first, last = shortened(table), shortened(replace(table, max_printed_rows=-12))
    assert (names_of(first)[0], len(first.rows), first.omitted_rows) == ("0", MOST, 5)
    assert (names_of(last)[-1], len(last.rows), last.omitted_rows) == (
        str(MOST + 4),
        MOST,
        5,
    )
    assert shortened(replace(table, rows=rows[:MOST])).rows == rows[:MOST]


def test_long_lists_of_a_plan_are_abridged_and_short_ones_are_as_they_are() -> None:
    plan: dict[str, Any] = {"cuts": [1, 2], "of": {"a": {"units": list(range(MOST))}}}
    assert json.dumps(abridged(plan, "plan.json")) == json.dumps(plan)
    many = {str(number): number for number in range(MOST + 1)}
    left = f"{MOST + 1 - EACH} more are in plan.json"
    assert abridged({"of": [many]}, "plan.json") == {
        "of": [dict(list(many.items())[:EACH]) | {"...": left}]
    }
    assert abridged(list(many), "plan.json") == [*list(many)[:EACH], f"... {left}"]


def test_hundreds_of_faults_are_shaded_once_where_they_overlap() -> None:
    run = crowd()
    (fault,) = run.metrics["fault_list"]
    faults = [
        {**fault, "struck": 0.001 * number, "undone": 2.0} for number in range(MOST)
    ]
    run.metrics["fault_list"] = [*faults, {**fault, "struck": 4.0, "undone": 5.0}]
    found = [
        (each["start"], each["end"], each["label"])
        for each in shaded(run)
        if each["style"] == "fault"
    ]
    assert found == [(0.0, 2.0, f"{MOST} times a fault"), (4.0, 5.0, "kill b")]
