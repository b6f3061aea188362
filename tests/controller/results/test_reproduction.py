"""A publication's figures beside ours: which runs a row takes, paired how, and what bad rows are told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from testbed.common.errors import InputError
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.schema import PaperPart, Scenario
from testbed_controller.cli.main import testbed as command_line
from testbed_controller.report import paper
from testbed_controller.results import files, reproduction
from testbed_controller.results.run import Run, run_name
from tests.helpers import recorded

SWEEP = {"workload.method.schedule": ["gpipe", "1f1b"]}


def made(folder: Path, times: dict[tuple[str, int], float]) -> list[Run]:
    """Write runs whose step times are set: of each schedule and repetition."""
    runs = []
    for (schedule, repetition), time in times.items():
        trial = replace(recorded.trial(), point={"workload.method": {"schedule": schedule}}, repetition=repetition)
        path = recorded.write(folder / run_name(trial), trial, recorded.plan(), recorded.outcome())
        run = files.load(path)
        runs.append(replace(run, metrics=run.metrics | {"step_time": time}))
    return runs


def rows(*parts: dict[str, Any]) -> PaperPart:
    return PaperPart.model_validate(
        {"source": "Somebody, Table 1", "rows": [{"name": "row", **part} for part in parts]}
    )


def test_ratios_are_taken_repetition_by_repetition(tmp_path: Path) -> None:
    runs = made(tmp_path, {("gpipe", 0): 2.0, ("gpipe", 1): 6.0, ("1f1b", 0): 1.0, ("1f1b", 1): 3.0})
    gpipe, one = {"workload.method.schedule": "gpipe"}, {"workload.method.schedule": "1f1b"}
    part = rows(
        {"figure": "step_time", "at": gpipe, "value": "2s", "expect": "within 5% of 4s"},
        {"figure": "step_time", "at": gpipe, "over": one, "value": 2.5, "expect": ">= 2.5"},
        {"figure": "step_time", "at": one, "over_figure": "predicted_step_time"},
        {"figure": "plan.none", "at": one},
        {"figure": "step_time", "at": gpipe, "minus": one, "value": "2s", "claim": "ranking"},
    )
    time, ratio, predicted, absent, less = reproduction.reproduce(part, runs)
    assert (time.ours, time.paper, time.ratio, time.runs, time.holds) == (4.0, 2.0, 2.0, 2, True)
    assert (ratio.ours, ratio.half_width, ratio.holds) == (2.0, 0.0, False)
    assert predicted.ours == pytest.approx(2.0 / 0.9)
    assert (less.ours, less.kind, less.outcome) == (2.0, "seconds", "reproduced")
    assert (time.outcome, ratio.outcome, absent.outcome) == ("not reproduced", "not reproduced", None)
    assert (absent.ours, absent.ratio, absent.runs) == (None, None, 0)
    reproduction.write(tmp_path, part, [time, ratio, predicted, absent])
    paper.write(tmp_path, part, [time, ratio, predicted, absent], runs)
    assert json.loads((tmp_path / "paper.json").read_text())["rows"][1]["ratio"] == pytest.approx(0.8)
    assert "| row | 2 s | 4 s |" in (tmp_path / "paper.md").read_text()


def test_the_least_of_several_points_says_which_it_is(tmp_path: Path) -> None:
    runs = made(tmp_path, {("gpipe", 0): 2.0, ("gpipe", 1): 6.0, ("1f1b", 0): 3.0, ("1f1b", 1): 3.0})
    over = {"workload.method.schedule": "gpipe"}
    part = rows(
        {"figure": "step_time", "least": True, "note": "ours"}, {"figure": "step_time", "least": True, "over": over}
    )
    least, score = reproduction.reproduce(part, runs)
    assert (least.ours, least.runs, least.remark) == (3.0, 2, "least at method schedule 1f1b; ours")
    assert score.ours == pytest.approx((1.5 + 0.5) / 2)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"figure": "step_tim"}, "did you mean 'step_time'"),
        ({"figure": "status"}, "is no number"),
        ({"figure": "step_time", "at": {"workload.method.schedule": "pipe"}}, "no point of the sweep has"),
        ({"figure": "step_time", "value": "5"}, "5"),
        ({"figure": "step_time", "expect": "big"}, "is not a condition"),
        ({"figure": "step_time", "over": {}, "value": "5s"}, "is not a number"),
    ],
)
def test_rows_that_cannot_come_out_are_refused_before_anything_runs(row: dict[str, Any], told: str) -> None:
    scenario = Scenario.model_validate(
        recorded.SCENARIO | {"sweep": SWEEP, "paper": {"source": "x", "rows": [{"name": "row", **row}]}}
    )
    with pytest.raises(InputError, match=told):
        prepare(trials(scenario)[0])


def test_several_sweeps_give_the_points_of_each() -> None:
    two = [{"workload.batch_size": [8, 16], "seed": [1, 2]}, {"workload.method.schedule": ["gpipe"]}]
    found = trials(Scenario.model_validate(recorded.SCENARIO | {"sweep": two}))
    assert len(found) == 5
    assert found[1].point == {"workload.batch_size": 8, "seed": 2}
    assert found[4].point == {"workload.method.schedule": "gpipe"}
    two[1] = {"seed": []}
    with pytest.raises(InputError, match=r"sweep.1.seed: has no values"):
        trials(Scenario.model_validate(recorded.SCENARIO | {"sweep": two}))


def test_further_points_stand_beside_the_sweep() -> None:
    extra = {"workload.method": {"name": "single"}}
    both = Scenario.model_validate(recorded.SCENARIO | {"sweep": SWEEP, "points": [extra]})
    assert [each.point for each in trials(both)][2:] == [extra]
    assert [each.point for each in trials(both.model_copy(update={"sweep": {}}))] == [extra]
    assert trials(both)[2].scenario.workload.method.name == "single"
    with pytest.raises(InputError, match="sets no key"):
        trials(both.model_copy(update={"points": ({},)}))


def test_a_table_comes_out_of_the_command_and_decides_its_status(tmp_path: Path) -> None:
    path = tmp_path / "paper.yaml"
    path.write_text(
        "name: table\ndevices: {source: {speed: 2gflops}, worker: {speed: 1gflops}}\n"
        "workload: {task: train, model: {name: mlp}, method: {name: pipeline}, steps: 3}\n"
        "sweep: {workload.method.schedule: [gpipe, 1f1b]}\npoints: [{workload.method: {name: single}}]\n"
        "paper:\n  source: Somebody, Table 1\n  rows:\n"
        "    - {name: as predicted, figure: step_time, at: {workload.method.name: single},"
        " over_figure: predicted_step_time, value: 1, expect: 'within 1% of 1'}\n"
        "    - {name: steps, figure: steps, at: {workload.method.schedule: gpipe}, value: 4, expect: '== 4'}\n"
    )
    done = CliRunner().invoke(command_line, ["run", str(path), "--runtime", "simulate", "--out", str(tmp_path / "out")])
    assert done.exit_code == 1, done.output
    assert "steps is 3.0, expected == 4" in str(done.exception)
    assert "Somebody, Table 1" in done.output
    assert [row["holds"] for row in json.loads((tmp_path / "out/paper.json").read_text())["rows"]] == [True, False]
    for page in (page for place in (tmp_path / "out").iterdir() if (page := place / "metrics.json").is_file()):
        page.with_name("events.jsonl").unlink()  # of a sweep the figures are enough
    again = CliRunner().invoke(command_line, ["report", str(tmp_path / "out")])
    assert "Somebody, Table 1" in again.output, again.output
    said = [
        file.relative_to(tmp_path / "out")
        for file in (tmp_path / "out").rglob("*.yaml")
        if "Somebody" in file.read_text()
    ]
    assert said == [Path("paper.yaml")], "what a publication has may be long: not in each run"
    assert (tmp_path / "out" / "sweep.html").stat().st_size > 10_000
    (tmp_path / "out/paper.yaml").write_text("source: Somebody\nrows: 3\n")
    broken = CliRunner().invoke(command_line, ["report", str(tmp_path / "out")])
    assert "out/paper.yaml: rows" in str(broken.exception)


def test_a_sweep_of_one_point_keeps_its_paper(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(
        "name: one\ndevices: {source: {speed: 2gflops}}\nsweep: {seed: [2]}\n"
        "workload: {task: train, model: {name: mlp}, method: {name: single}, steps: 3}\n"
        "paper: {source: 'Somebody, Table 2', rows: [{name: steps, figure: steps, value: 3}]}\n"
    )
    out = tmp_path / "out"
    done = CliRunner().invoke(command_line, ["run", str(path), "--runtime", "simulate", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "Somebody, Table 2" in CliRunner().invoke(command_line, ["report", str(out)]).output
