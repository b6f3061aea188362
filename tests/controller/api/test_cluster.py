from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
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

# Workers of a `LocalCluster` are forked from one process that has imported what they need, not begun anew each time.
os.environ.setdefault("DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD", "forkserver")
distributed = pytest.importorskip(
    "distributed", reason="the extra 'cluster' is not installed"
)

pytestmark = pytest.mark.timeout(
    400
)  # workers of a cluster each import torch, and some are killed

MODEL = """
from torch import nn

def own(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, {width}), nn.ReLU(), nn.Linear({width}, classes))
"""
FILES_OF_POINTS = """
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


@pytest.fixture(scope="module")
def client() -> Iterator[distributed.Client]:
    with (
        distributed.LocalCluster(
            2, threads_per_worker=1, dashboard_address=None
        ) as workers,
        distributed.Client(workers) as found,
    ):
        yield found


def planned(folder: Path) -> PlannedRun:
    return PlannedRun(prepare(trials(make_scenario())[0]), folder)


def kept(folder: Path) -> dict[str, object]:
    """Return what a folder of results holds, but for times, commands, and pages that show them."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        if path.name == "manifest.json":
            facts = json.loads(path.read_text())
            found[str(path.relative_to(folder))] = facts | {
                "date": 0,
                "wall_seconds": 0,
                "command": 0,
            }
        elif path.is_file() and path.suffix != ".html":
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def test_a_sweep_leaves_the_files_that_it_leaves_here(client, tmp_path: Path) -> None:
    here = api.sweep(make_scenario(), {"seed": [1, 2, 3]}, tmp_path / "here")
    there = api.sweep(
        make_scenario(), {"seed": [1, 2, 3]}, tmp_path / "there", cluster=client
    )
    assert [each.metrics for each in there] == [each.metrics for each in here]
    assert kept(tmp_path / "there") == kept(tmp_path / "here")
    page = next((tmp_path / "there").rglob("report.html")).read_text()
    assert str(tmp_path / "there") in page


def test_files_of_each_point_travel(client, tmp_path: Path) -> None:
    for name in ("slow", "fast"):
        speed = "1mflops" if name == "slow" else "1gflops"
        (tmp_path / f"{name}.yaml").write_text(f"speed: {speed}\nmemory: 1GiB\n")
        (tmp_path / f"{name}.py").write_text(
            MODEL.format(width=16 if name == "slow" else 8)
        )
    (tmp_path / "scenario.yaml").write_text(FILES_OF_POINTS)
    given = api.load(tmp_path / "scenario.yaml")
    here = api.sweep(given, out=tmp_path / "here")
    there = api.sweep(given, out=tmp_path / "there", cluster=client)
    assert [each.metrics for each in there] == [each.metrics for each in here]
    assert here[0].metrics["duration"] > here[1].metrics["duration"]


def test_a_trial_that_ends_three_workers_is_given_up_and_the_others_are_there(
    client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_simulate_files", cluster_tasks.kill_second_worker)
    monkeypatch.setattr(
        "testbed_controller.api.executors.load_metrics",
        lambda place: type("Run", (), {"path": place}),
    )
    done: list[int] = []
    before = client.run_on_scheduler(allowed_failures)
    assert before >= cluster.MAX_DEATHS
    counts = tmp_path / "deaths"
    runs = {number: planned(tmp_path / f"run{number}") for number in range(3)}
    monkeypatch.setattr(cluster, "_pack_trial", lambda _trial: (str(counts), {}))
    with pytest.raises(
        TestbedError, match=r"1 of 3 runs were lost with their workers 3 times \(run1\)"
    ):
        cluster.Cluster(client).execute(
            runs, SILENT, lambda number, _run: done.append(number)
        )
    assert sorted(done) == [0, 2]
    assert len(counts.read_text()) == cluster.MAX_DEATHS
    assert client.run_on_scheduler(allowed_failures) == before, "others may use it"


def test_only_those_are_given_up_that_were_under_way_as_workers_died(
    client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_simulate_files", cluster_tasks.kill_workers_twice)
    monkeypatch.setattr(
        "testbed_controller.api.executors.load_metrics",
        lambda place: type("Run", (), {"path": place}),
    )
    monkeypatch.setattr(
        cluster, "_pack_trial", lambda _trial: (str(tmp_path / "deaths"), {})
    )
    done: list[int] = []
    runs = {number: planned(tmp_path / f"run{number}") for number in range(8)}
    cluster.Cluster(client).execute(
        runs, SILENT, lambda number, _run: done.append(number)
    )
    assert sorted(done) == [*range(8)]


def allowed_failures(dask_scheduler: Any) -> int:
    failures: int = dask_scheduler.allowed_failures
    return failures


def test_runs_whose_folders_have_the_same_name_are_told_apart(
    client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_simulate_files", cluster_tasks.return_folder_path)
    monkeypatch.setattr(cluster, "_pack_trial", lambda _trial: ("", {}))
    monkeypatch.setattr(
        "testbed_controller.api.executors.load_metrics",
        lambda place: type("Run", (), {"path": place}),
    )
    runs = {}
    for number, parent in enumerate("ab"):
        (tmp_path / parent).mkdir()
        runs[number] = planned(tmp_path / parent / "run")
    cluster.Cluster(client).execute(runs, SILENT, lambda *_: None)
    for run in runs.values():
        assert (run.folder / "place").read_text() == str(run.folder)


def test_a_process_has_the_version_that_it_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "installed.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("own", "installed", "testbed.methods")
    monkeypatch.setattr(cluster.plugins, "installed", lambda _group: {"own": point})
    cluster.version.cache_clear()
    try:
        imported = cluster.version()
        (tmp_path / "installed.py").write_text("updated = True")
        assert cluster.version() == imported
        cluster.version.cache_clear()
        assert cluster.version() != imported
    finally:
        cluster.version.cache_clear()


def test_a_cluster_whose_workers_are_all_gone_is_not_waited_for_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_simulate_files", cluster_tasks.touch_and_sleep)
    monkeypatch.setattr(
        cluster, "_pack_trial", lambda _trial: (str(tmp_path / "begun"), {})
    )
    monkeypatch.setattr(cluster, "WORKER_TIMEOUT", 1.0)
    monkeypatch.setattr("testbed_controller.api.executors.POLL_SECONDS", 0.2)
    said = StringIO()
    with (
        distributed.LocalCluster(
            1, threads_per_worker=1, dashboard_address=None
        ) as workers,
        distributed.Client(workers) as found,
    ):

        def remove() -> None:
            while not (tmp_path / "begun").exists():
                time.sleep(0.1)
            workers.scale(0)

        threading.Thread(target=remove).start()
        with pytest.raises(
            HostError,
            match="no worker for 1 s: start workers, then continue with --resume",
        ):
            cluster.Cluster(found).execute(
                {0: planned(tmp_path / "r")}, Console(file=said), lambda *_: None
            )
    assert "no worker is left" in said.getvalue()


def test_workers_of_another_version_are_refused(
    client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "version", lambda: "9.9-theirs")
    with pytest.raises(
        HostError, match=r"worker .* has testbed .*, this machine 9.9-theirs"
    ):
        cluster.Cluster(client).execute({0: planned(tmp_path)}, SILENT, lambda *_: None)


def test_files_that_do_not_travel_are_refused(tmp_path: Path) -> None:
    trial = planned(tmp_path).trial
    workload = trial.scenario.workload
    model = workload.model.model_copy(update={"weights": "w.safetensors"})
    given = trial.scenario.model_copy(
        update={"workload": workload.model_copy(update={"model": model})}
    )
    with pytest.raises(
        InputError,
        match=r"workload.model.weights: w.safetensors is not sent to workers",
    ):
        cluster._pack_trial(replace(trial, scenario=given))


def test_where_no_scheduler_answers_it_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "CONNECT_TIMEOUT", 1)
    with (
        pytest.raises(
            HostError,
            match=r"no Dask scheduler answers at tcp://127.0.0.1:9 .*dask scheduler",
        ),
        cluster.connected("tcp://127.0.0.1:9"),
    ):
        pass
