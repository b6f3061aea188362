"""Sweeps on a Dask cluster: results, files of trials, lost workers and refused workers."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import EntryPoint
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import testbed_controller.api as api
from testbed.common.errors import HostError, InputError, TestbedError
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed_controller.api import cluster
from testbed_controller.api.executors import PlannedRun
from tests.helpers import cluster_tasks
from tests.helpers.runs import make_scenario

# Workers are forked from one process with all imports done; by default each worker imports torch again.
os.environ.setdefault("DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD", "forkserver")
distributed = pytest.importorskip(
    "distributed", reason="the extra 'cluster' is not installed"
)

# Some tests kill workers, and the cluster starts new ones.
pytestmark = pytest.mark.timeout(400)

MODEL = """
from torch import nn

def own(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, {width}), nn.ReLU(), nn.Linear({width}, classes))
"""
SCENARIO_WITH_FILES = """
name: files
devices: {alone: {profile: slow.yaml}}
workload:
  model: {file: slow.py, name: own}
  data: {name: digits, train: 64, test: 20}
  method: {name: single}
  batch_size: 16
  steps: 2
sweep:
  together:
    devices.alone.profile: [slow.yaml, fast.yaml]
    workload.model.file: [slow.py, fast.py]
"""
SILENT = Console(file=StringIO())


@contextmanager
def start_cluster(workers: int) -> Iterator[tuple[Any, Any]]:
    """Start a local cluster with a client."""
    with (
        distributed.LocalCluster(
            workers, threads_per_worker=1, dashboard_address=None
        ) as local_cluster,
        distributed.Client(local_cluster) as client,
    ):
        yield local_cluster, client


@pytest.fixture(scope="module")
def client() -> Iterator[distributed.Client]:
    with start_cluster(2) as (_, client):
        yield client


def planned_run(folder: Path) -> PlannedRun:
    return PlannedRun(prepare(trials(make_scenario())[0]), folder)


@pytest.fixture
def replace_task(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, object], None]:
    """A function (task, argument), which replaces the simulation in workers by a task of `cluster_tasks`."""

    def apply(task: Any, argument: object) -> None:
        monkeypatch.setattr(cluster, "_simulate_files", task)
        # The trial is the first argument of the task.
        monkeypatch.setattr(cluster, "_pack_trial", lambda _trial: (str(argument), {}))
        # The tasks return no metrics.
        monkeypatch.setattr(
            "testbed_controller.api.executors.load_metrics",
            lambda path: type("Run", (), {"path": path}),
        )

    return apply


def read_results(folder: Path) -> dict[str, object]:
    """Return the files of a results folder, without times and commands, and without pages, which contain times."""
    files: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "manifest.json":
            manifest = json.loads(path.read_text())
            variable = dict.fromkeys(("date", "wall_seconds", "command"), 0)
            files[name] = manifest | variable
        elif path.is_file() and path.suffix != ".html":
            files[name] = path.read_bytes()
    return files


def metrics_of(results: api.Results) -> list[dict[str, Any]]:
    return [dict(result.metrics) for result in results]


def test_sweep_on_a_cluster_has_the_results_of_a_local_sweep(
    client, tmp_path: Path
) -> None:
    values = {"seed": [1, 2, 3]}
    local = api.sweep(make_scenario(), values, tmp_path / "local")
    remote = api.sweep(make_scenario(), values, tmp_path / "remote", cluster=client)
    assert metrics_of(remote) == metrics_of(local)
    assert read_results(tmp_path / "remote") == read_results(tmp_path / "local")
    # The page names the final folder, not a folder of the worker.
    page = next((tmp_path / "remote").rglob("report.html")).read_text()
    assert str(tmp_path / "remote") in page


def test_files_of_each_point_are_sent_to_workers(client, tmp_path: Path) -> None:
    for name, speed, width in (("slow", "1mflops", 16), ("fast", "1gflops", 8)):
        profile, model = tmp_path / f"{name}.yaml", tmp_path / f"{name}.py"
        profile.write_text(f"speed: {speed}\nmemory: 1GiB\n")
        model.write_text(MODEL.format(width=width))
    (tmp_path / "scenario.yaml").write_text(SCENARIO_WITH_FILES)
    scenario = api.load(tmp_path / "scenario.yaml")
    local = api.sweep(scenario, out=tmp_path / "local")
    remote = api.sweep(scenario, out=tmp_path / "remote", cluster=client)
    assert metrics_of(remote) == metrics_of(local)
    slow, fast = local
    assert slow.metrics["duration"] > fast.metrics["duration"]


def test_run_that_kills_three_workers_is_given_up(
    client, tmp_path: Path, replace_task: Callable[[Any, object], None]
) -> None:
    deaths = tmp_path / "deaths"
    replace_task(cluster_tasks.kill_second_worker, deaths)
    limit_before = client.run_on_scheduler(read_allowed_failures)
    assert limit_before >= cluster.MAX_DEATHS
    runs = {number: planned_run(tmp_path / f"run{number}") for number in range(3)}
    finished: list[int] = []
    with pytest.raises(
        TestbedError, match=r"1 of 3 runs were lost with their workers 3 times \(run1\)"
    ):
        cluster.Cluster(client).execute(
            runs, SILENT, lambda number, _run: finished.append(number)
        )
    assert sorted(finished) == [0, 2]
    assert len(deaths.read_text()) == cluster.MAX_DEATHS
    # Other users of the scheduler must have their own limit again.
    assert client.run_on_scheduler(read_allowed_failures) == limit_before


def read_allowed_failures(dask_scheduler: Any) -> int:
    failures: int = dask_scheduler.allowed_failures
    return failures


def test_waiting_runs_are_not_blamed_for_dead_workers(
    client, tmp_path: Path, replace_task: Callable[[Any, object], None]
) -> None:
    # Two of eight runs kill their workers twice each. Dask counts the four deaths for waiting runs, too.
    replace_task(cluster_tasks.kill_workers_twice, tmp_path / "deaths")
    runs = {number: planned_run(tmp_path / f"run{number}") for number in range(8)}
    finished: list[int] = []
    cluster.Cluster(client).execute(
        runs, SILENT, lambda number, _run: finished.append(number)
    )
    assert sorted(finished) == list(range(8))


def test_folders_of_equal_names_are_distinguished(
    client, tmp_path: Path, replace_task: Callable[[Any, object], None]
) -> None:
    replace_task(cluster_tasks.return_folder_path, "")
    runs = {}
    for number, parent in enumerate("ab"):
        (tmp_path / parent).mkdir()
        runs[number] = planned_run(tmp_path / parent / "run")
    cluster.Cluster(client).execute(runs, SILENT, lambda *_: None)
    for run in runs.values():
        assert (run.folder / "place").read_text() == str(run.folder)


def test_version_of_a_process_is_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process runs the code that it imported, even if the files change later.
    module = tmp_path / "installed.py"
    module.touch()
    monkeypatch.syspath_prepend(tmp_path)
    plugin = EntryPoint("own", "installed", "testbed.methods")
    monkeypatch.setattr(cluster.plugins, "installed", lambda _group: {"own": plugin})
    cluster.version.cache_clear()
    try:
        imported = cluster.version()
        module.write_text("updated = True")
        assert cluster.version() == imported
        cluster.version.cache_clear()
        assert cluster.version() != imported
    finally:
        cluster.version.cache_clear()


def test_loss_of_all_workers_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replace_task: Callable[[Any, object], None],
) -> None:
    started = tmp_path / "started"
    replace_task(cluster_tasks.touch_and_sleep, started)
    monkeypatch.setattr(cluster, "WORKER_TIMEOUT", 1.0)
    monkeypatch.setattr("testbed_controller.api.executors.POLL_SECONDS", 0.2)
    output = StringIO()
    with start_cluster(1) as (workers, client):

        def remove_worker() -> None:
            while not started.exists():
                time.sleep(0.1)
            workers.scale(0)

        threading.Thread(target=remove_worker).start()
        with pytest.raises(
            HostError,
            match="no worker for 1 s: start workers, then continue with --resume",
        ):
            cluster.Cluster(client).execute(
                {0: planned_run(tmp_path / "r")}, Console(file=output), lambda *_: None
            )
    assert "no worker is left" in output.getvalue()


def test_workers_of_another_version_are_refused(
    client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "version", lambda: "9.9-theirs")
    with pytest.raises(
        HostError, match=r"worker .* has testbed .*, this machine 9.9-theirs"
    ):
        cluster.Cluster(client).execute(
            {0: planned_run(tmp_path)}, SILENT, lambda *_: None
        )


def test_relative_weights_file_is_refused(tmp_path: Path) -> None:
    trial = planned_run(tmp_path).trial
    workload = trial.scenario.workload
    model = workload.model.model_copy(update={"weights": "w.safetensors"})
    changed_workload = workload.model_copy(update={"model": model})
    scenario = trial.scenario.model_copy(update={"workload": changed_workload})
    with pytest.raises(
        InputError,
        match=r"workload.model.weights: w.safetensors is not sent to workers",
    ):
        cluster._pack_trial(replace(trial, scenario=scenario))


def test_missing_scheduler_is_reported_with_a_command_to_start_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "CONNECT_TIMEOUT", 1)
    # No service uses port 9 (discard).
    with (
        pytest.raises(
            HostError,
            match=r"no Dask scheduler answers at tcp://127.0.0.1:9 .*dask scheduler",
        ),
        cluster.connected("tcp://127.0.0.1:9"),
    ):
        pass
