"""Simulations, sweeps and exported tables through the Python interface, also in a notebook."""

from __future__ import annotations

import asyncio
import csv
import gc
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

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


def column(rows: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


def test_result_has_metrics_tables_and_plots(tmp_path: Path) -> None:
    result = simulate(build(**SMALL), tmp_path / "one")
    assert result.metrics["steps"] == 4
    assert column(result.rows("steps"), "step") == [0, 1, 2, 3]
    assert set(column(result.rows("events"), "event")) >= {"compute", "step"}
    assert set(result.plots) == {"Loss", "Time per step"}
    assert "Accuracy" in str(result)
    with pytest.raises(InputError, match="choose one of metrics, events"):
        result.rows("nothing")
    with pytest.raises(InputError, match="choose one of Loss, Time per step"):
        result.plot("nothing")


@pytest.mark.parametrize(
    ("key", "value"),
    [("description", Path("x.safetensors")), ("seed", np.int64(7))],
    ids=["path", "numpy integer"],
)
def test_changed_values_may_be_paths_and_numpy_numbers(key: str, value: object) -> None:
    changed = load("quickstart", {key: value})
    assert str(getattr(changed, key)) == str(value)


def test_numpy_array_as_a_single_value_is_refused() -> None:
    with pytest.raises(InputError, match="seed"):
        load("quickstart", {"seed": np.array([1])})


def test_value_of_an_unsupported_type_is_refused() -> None:
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


def test_values_of_a_sweep_may_be_a_numpy_array(tmp_path: Path) -> None:
    results = sweep(build(**SMALL), {"seed": np.arange(1, 3)}, tmp_path / "sweep")
    assert column(results.rows(), "seed") == [1, 2]


def test_points_with_the_same_label_have_different_folders(tmp_path: Path) -> None:
    points = [{"label": "A", "seed": 1}, {"label": "A", "seed": 2}]
    results = sweep(build(**SMALL, points=points), out=tmp_path / "sweep")
    first, second = results
    assert (first.path.name, second.path.name) == ("small,A", "small,A-2")
    assert first.run.trial.scenario.seed == 1
    assert second.run.trial.scenario.seed == 2


def test_simulation_works_within_a_running_event_loop(tmp_path: Path) -> None:
    # The cells of a notebook run within a loop.
    async def cell() -> float:
        return float(simulate(build(**SMALL), tmp_path / "one").metrics["accuracy"])

    assert 0 <= asyncio.run(cell()) <= 1


def test_results_of_a_sweep_have_a_row_for_each_run(tmp_path: Path) -> None:
    values = {"workload.batch_size": [8, 16], "seed": [1, 2]}
    results = sweep(build(**SMALL), values, tmp_path / "zip", together=True)
    assert column(results.rows(), "workload.batch_size") == [8, 16]
    assert column(results.rows(), "seed") == [1, 2]
    reopened = open_results(tmp_path / "zip")
    assert isinstance(reopened, Results)
    assert reopened.rows() == results.rows()


def count_worlds() -> int:
    """Return the number of simulated worlds in memory."""
    worlds = [item for item in gc.get_objects() if isinstance(item, World)]
    return len(worlds)


def test_sweep_frees_each_simulation_after_run(tmp_path: Path) -> None:
    # Devices, tasks and events of a world refer to each other, so only a sweep that collects garbage frees the world.
    gc.collect()
    count_before = count_worlds()
    gc.disable()
    try:
        sweep(build(**SMALL), {"seed": [1, 2, 3, 4]}, tmp_path / "seeds")
        remaining = count_worlds() - count_before
    finally:
        gc.enable()
    assert remaining <= 2


def test_simulation_of_several_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 2 runs: use sweep"):
        simulate(build(**SMALL, repetitions=2), tmp_path / "two")


def test_misspelt_key_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InputError, match="unknown key 'sede': did you mean 'seed'"):
        build(**SMALL, sede=3)


def test_changed_model_file_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    workload = {**SMALL["workload"], "model": {"file": "net.py", "name": "build"}}
    scenario_keys = {**SMALL, "workload": workload}
    for width in (4, 6):
        layers = f"nn.Flatten(), nn.Linear(64, {width}), nn.Linear({width}, 10)"
        Path("net.py").write_text(
            f"from torch import nn\ndef build():\n    return nn.Sequential({layers})\n"
        )
        simulate(build(**scenario_keys), f"width{width}")
        # The results contain a copy of the model's file.
        assert f"Linear(64, {width})" in Path(f"width{width}", "net.py").read_text()


def export_results(folder: Path, option: str) -> Result:
    return CliRunner().invoke(export, [str(folder), option], catch_exceptions=False)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_tables_are_exported_to_files(tmp_path: Path) -> None:
    pipeline = {"method": {"name": "pipeline", "micro_batches": 1}}
    changes = {
        "devices": {"source": {"profile": "laptop"}, "worker": {"profile": "laptop"}},
        "network": {"link": {"delay": "1ms", "rate": "10mbit"}},
        "workload": SMALL["workload"] | pipeline,
    }
    simulate(build(**SMALL | changes), tmp_path / "one")
    assert export_results(tmp_path / "one", "--csv").exit_code == 0
    exported = tmp_path / "one" / "export"
    steps = read_csv(exported / "steps.csv")
    assert column(steps, "step") == ["0", "1", "2", "3"]
    [first_link, *_] = read_csv(exported / "links.csv")
    assert float(first_link["requested.delay"]) > 0
    for row in read_csv(exported / "devices.csv"):
        assert isinstance(json.loads(row["units"]), list)
    # Quotes would be those of Python's representation of a value.
    assert "'" not in (exported / "links.csv").read_text()
    export_results(tmp_path / "one", "--perfetto")
    assert json.loads((exported / "trace.json").read_text())["traceEvents"]


def test_tables_are_available_as_data_frames(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    result = simulate(build(**SMALL), tmp_path / "one")
    assert result.frame("steps")["step"].tolist() == [0, 1, 2, 3]
    pytest.importorskip("pyarrow")
    outcome = export_results(tmp_path / "one", "--parquet")
    assert "metrics.parquet" in outcome.output


def test_data_frame_without_pandas_is_refused_with_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="needs pandas: pip install"):
        simulate(build(**SMALL), tmp_path / "one").frame("steps")


def test_examples_of_the_documentation_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "scenarios").symlink_to(DOCS.parent / "scenarios")
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "python.md").read_text()
    first, *others = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    # Three steps instead of an epoch save time.
    shortened = first.replace(
        '"workload.epochs": 1', '"workload.epochs": None, "workload.steps": 3'
    )
    assert shortened != first
    names: dict[str, Any] = {}
    for block in (shortened, *others):
        exec(compile(block, "python.md", "exec"), names)
    assert load("quickstart").name == "quickstart"
    assert len(names["results"]) == 2
    # Steps of the callback, and the suggested key of the error.
    printed = capsys.readouterr().out
    assert printed.count(" s: loss ") == 3
    assert "epochs" in printed


def test_notebook_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((DOCS / "python.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        assert not cell.get("outputs")
        text = "".join(cell["source"])
        needs_pandas = ".frame(" in text
        if cell["cell_type"] != "code" or (needs_pandas and not has_pandas()):
            continue
        exec(compile(text, cell["id"], "exec"), names)
    assert len(names["runs"]) == 2


def has_pandas() -> bool:
    try:
        import pandas  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.parametrize(
    "package", ["agent/testbed_agent", "controller/testbed_controller", "testbed"]
)
def test_type_checkers_use_the_types_of_packages(package: str) -> None:
    # Without the marker, mypy regards an imported package as untyped.
    assert (ROOT / package / "py.typed").exists()
