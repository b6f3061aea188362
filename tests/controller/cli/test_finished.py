"""Failure of a command after its runs: unmet expectations, failed runs and divergence."""

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


def load_run(
    folder: Path,
    name: str = "run",
    expect: dict[str, Any] | None = None,
    **changes: Any,
) -> Run:
    """Return the recorded run with other expectations and other fields of the outcome."""
    trial = recorded.make_trial(expect=expect or {})
    outcome = recorded.make_outcome(**changes)
    plan = recorded.make_plan()
    return files.load(recorded.write_run(folder / name, trial, plan, outcome))


def test_finished_run_with_met_expectations_passes(tmp_path: Path) -> None:
    judge([load_run(tmp_path, expect={"accuracy": ">= 0.9"})])


def test_unmet_expectations_are_reported_with_measured_values(tmp_path: Path) -> None:
    # The recorded run has five steps, so that one of three expectations is met.
    expect = {"accuracy": "> 0.99", "steps": ">= 5", "recovery_time": "< 1s"}
    with pytest.raises(ExpectationError) as raised:
        judge([load_run(tmp_path, expect=expect)])
    first, second = str(raised.value).split("; ")
    assert first.startswith("accuracy is 0.95, ")
    assert first.endswith("expected > 0.99")
    assert second.startswith("recovery_time is 1.68")


def test_error_names_run_among_several(tmp_path: Path) -> None:
    runs = [
        load_run(tmp_path, "one", {"accuracy": ">= 0.9"}),
        load_run(tmp_path, "two", {"accuracy": "> 0.99"}),
    ]
    with pytest.raises(ExpectationError, match=r"^two: accuracy is 0.95, "):
        judge(runs)


@pytest.mark.parametrize(
    ("status", "error_class", "message"),
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
def test_failed_run_is_reported_with_last_line_of_its_error(
    tmp_path: Path, status: str, error_class: type[Exception], message: str
) -> None:
    run = load_run(
        tmp_path,
        # Expectations of an incomplete run mean nothing, and are not reported.
        expect={"accuracy": "> 0.99"},
        status=status,
        error="Traceback\n  of many lines\nit ends here\n",
    )
    with pytest.raises(error_class, match=message) as raised:
        judge([run])
    # Subclasses have other exit codes.
    assert type(raised.value) is error_class


def load_diverged(folder: Path, **keys: Any) -> Run:
    """Return the recorded run with a training loss of NaN from step 3 on."""
    events = []
    for event in recorded.make_events(faulty=False):
        if event.event == "step" and event.fields["step"] >= 3:
            event = event._replace(fields={**event.fields, "loss": math.nan})
        events.append(event)
    return load_run(folder, events=events, **keys)


def test_divergence_is_reported_with_device_and_step(
    tmp_path: Path,
) -> None:
    run = load_diverged(tmp_path, expect={"accuracy": "> 0.99"})
    with pytest.raises(DivergedError, match=r"run \(\w+, step 3\)") as raised:
        judge([run])
    assert raised.value.exit_code == 4
    # JSON has no NaN, although Python writes and reads it.
    for line in (run.path / "events.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_scenario_may_expect_divergence(tmp_path: Path) -> None:
    judge([load_diverged(tmp_path, expect={"diverged": "== true"})])


def test_failure_without_reason_is_reported_as_unknown(tmp_path: Path) -> None:
    with pytest.raises(TestbedError, match="the run failed: the reason is unknown"):
        judge([load_run(tmp_path, status="failed", error="")])
