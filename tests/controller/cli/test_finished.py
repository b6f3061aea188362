"""What ends a command with a failure once its runs are over."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from testbed.common.errors import (
    DivergedError,
    ExpectationError,
    StoppedError,
    TestbedError,
)
from testbed_controller.cli.finished import judge
from testbed_controller.results import files
from testbed_controller.results.run import Run
from tests.helpers import recorded


def run(
    folder: Path,
    name: str = "run",
    expect: dict[str, Any] | None = None,
    **outcome: Any,
) -> Run:
    trial = recorded.make_trial(expect=expect or {})
    return files.load(
        recorded.write_run(
            folder / name, trial, recorded.make_plan(), recorded.make_outcome(**outcome)
        )
    )


def test_runs_that_came_to_their_end_as_expected_end_in_nothing(tmp_path: Path) -> None:
    judge([run(tmp_path, expect={"accuracy": ">= 0.9"})])


def test_an_expectation_that_does_not_hold_is_said_with_what_was_found(
    tmp_path: Path,
) -> None:
    with pytest.raises(ExpectationError) as raised:
        judge(
            [
                run(
                    tmp_path,
                    expect={
                        "accuracy": "> 0.99",
                        "steps": ">= 5",
                        "recovery_time": "< 1s",
                    },
                )
            ]
        )
    first, second = str(raised.value).split("; ")
    assert first.startswith("accuracy is 0.95, ")
    assert first.endswith("expected > 0.99")
    assert second.startswith("recovery_time is 1.68")


def test_of_several_runs_each_is_named(tmp_path: Path) -> None:
    several = [
        run(tmp_path, name, {"accuracy": limit})
        for name, limit in (("one", ">= 0.9"), ("two", "> 0.99"))
    ]
    with pytest.raises(ExpectationError, match=r"^two: accuracy is 0.95, "):
        judge(several)


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (
            "failed",
            TestbedError,
            "the run failed: it ends here; partial results are in",
        ),
        ("timed out", TestbedError, "the run timed out: it ends here"),
        ("interrupted", StoppedError, "the run was interrupted: it ends here"),
    ],
)
def test_a_run_that_did_not_come_to_its_end_says_why_before_anything_is_expected(
    tmp_path: Path, status: str, kind: type[Exception], said: str
) -> None:
    failed = run(
        tmp_path,
        expect={"accuracy": "> 0.99"},
        status=status,
        error="Traceback\n  of many lines\nit ends here\n",
    )
    with pytest.raises(kind, match=said) as raised:
        judge([failed])
    assert type(raised.value) is kind


def diverged(folder: Path, **keys: Any) -> Run:
    """Return a run, read from its files, whose training loss is NaN from step 3 on."""
    events = []
    for event in recorded.make_events(faulty=False):
        step = event.fields.get("step", 0)
        lost = event.event == "step" and step >= 3
        events.append(
            event._replace(fields={**event.fields, "loss": math.nan}) if lost else event
        )
    return run(folder, events=events, **keys)


def test_a_diverged_run_has_a_status_of_its_own_and_names_device_and_step(
    tmp_path: Path,
) -> None:
    found = diverged(tmp_path, expect={"accuracy": "> 0.99"})
    with pytest.raises(DivergedError, match=r"run \(\w+, step 3\)") as raised:
        judge([found])
    assert raised.value.exit_code == 4
    for line in (found.path / "events.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_a_scenario_may_expect_divergence(tmp_path: Path) -> None:
    judge([diverged(tmp_path, expect={"diverged": "== true"})])


def test_a_failure_without_a_reason_says_so(tmp_path: Path) -> None:
    with pytest.raises(TestbedError, match="the run failed: the reason is unknown"):
        judge([run(tmp_path, status="failed", error="")])
