"""The testbed from Python, in a notebook too, and its tables in files."""

from __future__ import annotations

import asyncio
import csv
import gc
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from testbed.common.errors import InputError
from testbed.simulation.world import World
from testbed_controller.api import (
    Results,
    build,
    load,
    open_results,
    run,
    simulate,
    sweep,
)
from testbed_controller.cli.export import export
from tests.helpers import ROOT

DOCS = ROOT / "docs"
SMALL: dict[str, Any] = {
    "name": "small",
    "devices": {"source": {"profile": "laptop"}},
    "workload": {
        "model": {"name": "mlp", "hidden": [8]},
        "data": {"name": "digits", "train": 64, "test": 20},
        "method": {"name": "single"},
        "batch_size": 16,
        "steps": 4,
    },
}


def test_a_run_has_figures_tables_and_plots(tmp_path: Path) -> None:
    run = simulate(build(**SMALL), tmp_path / "one")
    assert run.metrics["steps"] == 4
    assert [row["step"] for row in run.rows("steps")] == [0, 1, 2, 3]
    assert {row["event"] for row in run.rows("events")} >= {"compute", "step"}
    assert set(run.plots) == {"Loss", "Time per step"}
    assert "Accuracy" in str(run)
    for act, message in (
        (run.rows, "choose one of metrics, events"),
        (run.plot, "choose one of Loss, Time per step"),
    ):
        with pytest.raises(InputError, match=message):
            act("nothing")


@pytest.mark.parametrize("value", [Path("x.safetensors"), np.int64(7), np.array([1])])
def test_changes_may_be_paths_and_numbers_of_numpy(value: object) -> None:
    key = "description" if isinstance(value, Path) else "seed"
    if isinstance(value, np.ndarray):
        with pytest.raises(InputError, match="seed"):
            load("quickstart", {key: value})
        return
    changed = load("quickstart", {key: value})
    assert str(getattr(changed, key)) == str(value)


def test_change_that_a_scenario_cannot_have_is_refused() -> None:
    with pytest.raises(
        InputError, match="seed: values of type object cannot be written"
    ):
        load("quickstart", {"seed": object()})


def test_unknown_runtime_is_refused(tmp_path: Path) -> None:
    scenario = build(**SMALL)
    for call in (run, sweep):
        with pytest.raises(InputError, match="unknown runtime 'simulated': choose"):
            call(scenario, out=tmp_path / "one", runtime="simulated")  # type: ignore[operator]
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("values", ["adam", 3, None])
def test_single_value_of_a_swept_key_is_refused(values: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the values of 'seed' must be a list"):
        sweep(build(**SMALL), {"seed": values}, tmp_path / "one")


def test_values_of_a_sweep_may_be_those_of_numpy(tmp_path: Path) -> None:
    results = sweep(build(**SMALL), {"seed": np.arange(1, 3)}, tmp_path / "sweep")
    assert [row["seed"] for row in results.rows()] == [1, 2]


def test_points_with_one_label_have_folders_of_their_own(tmp_path: Path) -> None:
    points = [{"label": "A", "seed": 1}, {"label": "A", "seed": 2}]
    results = sweep(build(**SMALL, points=points), out=tmp_path / "sweep")
    assert [result.path.name for result in results] == ["small,A", "small,A-2"]
    assert [result.run.trial.scenario.seed for result in results] == [1, 2]


def test_it_runs_where_a_loop_runs_already(tmp_path: Path) -> None:
    async def cell() -> float:
        return float(simulate(build(**SMALL), tmp_path / "one").metrics["accuracy"])

    assert 0 <= asyncio.run(cell()) <= 1


def test_a_sweep_has_a_row_for_each_run(tmp_path: Path) -> None:
    values = {"workload.batch_size": [8, 16], "seed": [1, 2]}
    runs = sweep(build(**SMALL), values, tmp_path / "zip", together=True)
    assert [(row["workload.batch_size"], row["seed"]) for row in runs.rows()] == [
        (8, 1),
        (16, 2),
    ]
    again = open_results(tmp_path / "zip")
    assert isinstance(again, Results)
    assert again.rows() == runs.rows()


def test_a_sweep_keeps_no_simulation_but_the_last(tmp_path: Path) -> None:
    """Each is a circle of devices, tasks and events, which nothing but the garbage collector takes apart."""
    gc.collect()
    before = sum(isinstance(each, World) for each in gc.get_objects())
    gc.disable()
    try:
        sweep(build(**SMALL), {"seed": [1, 2, 3, 4]}, tmp_path / "seeds")
        kept = sum(isinstance(each, World) for each in gc.get_objects()) - before
    finally:
        gc.enable()
    assert kept <= 2


def test_several_runs_are_no_run_and_mistakes_are_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 2 runs: use sweep"):
        simulate(build(**SMALL, repetitions=2), tmp_path / "two")
    with pytest.raises(InputError, match="unknown key 'sede': did you mean 'seed'"):
        build(**SMALL, sede=3)


def test_an_edited_file_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    workload = {**SMALL["workload"], "model": {"file": "net.py", "name": "build"}}  # type: ignore[dict-item]
    kept = []
    for width in (4, 6):
        layers = f"nn.Flatten(), nn.Linear(64, {width}), nn.Linear({width}, 10)"
        Path("net.py").write_text(
            f"from torch import nn\ndef build():\n    return nn.Sequential({layers})\n"
        )
        scenario = build(**{**SMALL, "workload": workload})
        simulate(scenario, f"width{width}")
        kept.append(
            f"Linear(64, {width})" in Path(f"width{width}", "net.py").read_text()
        )
    assert kept == [True, True]


def test_tables_in_files(tmp_path: Path) -> None:
    devices = {"source": {"profile": "laptop"}, "worker": {"profile": "laptop"}}
    changes = {
        "devices": devices,
        "network": {"link": {"delay": "1ms", "rate": "10mbit"}},
    }
    workload = SMALL["workload"] | {"method": {"name": "pipeline", "micro_batches": 1}}
    simulate(build(**SMALL | changes | {"workload": workload}), tmp_path / "one")
    done = CliRunner().invoke(
        export, [str(tmp_path / "one"), "--csv"], catch_exceptions=False
    )
    assert done.exit_code == 0
    with (tmp_path / "one" / "export" / "steps.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["0", "1", "2", "3"]
    with (tmp_path / "one" / "export" / "links.csv").open() as file:
        assert float(next(csv.DictReader(file))["requested.delay"]) > 0
    with (tmp_path / "one" / "export" / "devices.csv").open() as file:
        assert all(
            isinstance(json.loads(row["units"]), list) for row in csv.DictReader(file)
        )
    assert (
        "'" not in (tmp_path / "one" / "export" / "links.csv").read_text()
    )  # no value as Python shows it
    CliRunner().invoke(
        export, [str(tmp_path / "one"), "--perfetto"], catch_exceptions=False
    )
    assert json.loads((tmp_path / "one" / "export" / "trace.json").read_text())[
        "traceEvents"
    ]


def test_frames(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    run = simulate(build(**SMALL), tmp_path / "one")
    assert run.frame("steps")["step"].tolist() == [0, 1, 2, 3]
    pytest.importorskip("pyarrow")
    done = CliRunner().invoke(
        export, [str(tmp_path / "one"), "--parquet"], catch_exceptions=False
    )
    assert "metrics.parquet" in done.output


def test_without_pandas_frames_say_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(InputError, match="needs pandas: pip install"):
        simulate(build(**SMALL), tmp_path / "one").frame("steps")


def test_the_page_works(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "scenarios").symlink_to(DOCS.parent / "scenarios")
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    short = blocks[0].replace(
        '"workload.epochs": 1', '"workload.epochs": None, "workload.steps": 3'
    )
    assert short != blocks[0]
    names: dict[str, Any] = {}
    for block in (short, *blocks[1:]):
        exec(compile(block, "python.md", "exec"), names)
    assert load("quickstart").name == "quickstart"
    assert len(names["results"]) == 2
    # Steps of the callback, and the suggested key of the error.
    printed = capsys.readouterr().out
    assert printed.count(" s: loss ") == 3
    assert "epochs" in printed


def test_the_notebook_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((DOCS / "python.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        text = "".join(cell["source"])
        assert not cell.get("outputs")
        if cell["cell_type"] == "code" and (".frame(" not in text or _has_pandas()):
            exec(compile(text, cell["id"], "exec"), names)
    assert len(names["runs"]) == 2  # type: ignore[arg-type]


def _has_pandas() -> bool:
    try:
        import pandas  # noqa: F401
    except ImportError:
        return False
    return True


def test_users_programs_are_checked_against_its_types() -> None:
    for package in (
        "agent/testbed_agent",
        "controller/testbed_controller",
        "testbed",
    ):  # without the marker mypy takes what it imports for untyped
        assert (ROOT / package / "py.typed").exists()
