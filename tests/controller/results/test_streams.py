"""Export of a running experiment: CSV, callbacks, and trackers of other projects."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path

import pytest

from testbed.common.errors import InputError
from testbed.trace.events import Event
from testbed_controller.api import load, simulate
from testbed_controller.results.exporters import Callback
from testbed_controller.results.run import Run
from testbed_controller.results.streams import EventDispatcher
from tests.helpers import recorded

EVENTS = [
    # Not exported.
    Event(1.0, "a", "compute", {"span": "forward"}),
    Event(1.5, "a", "step", {"step": 300, "loss": 0.25, "samples": 8}),
    Event(2.5, "a", "evaluate", {"step": 300, "loss": 0.5, "accuracy": 0.75}),
    Event(3.0, "b", "request", {"request": 2, "latency": 0.125}),
    Event(4.0, "a", "step", {"step": 301, "loss": None, "samples": 8}),
]


def test_csv_rows_are_written_during_run(tmp_path: Path) -> None:
    stream = tmp_path / "stream.csv"
    with EventDispatcher(tmp_path, ["csv"]) as run:
        for exported, event in enumerate(EVENTS):
            run.event(event)
            # The heading is one more line.
            assert len(stream.read_text().splitlines()) == 1 + exported
    with stream.open() as file:
        rows = list(csv.DictReader(file))
    assert rows[1] == {
        "time": "2.5",
        "device": "a",
        "event": "evaluate",
        "step": "300",
        "loss": "0.5",
        "accuracy": "0.75",
        "latency": "",
    }


class FailingCallback(Callback):
    def on_end(self, run: Run | None) -> None:
        raise OSError("no space left")


class CountingCallback(Callback):
    ends = 0

    def on_end(self, run: Run | None) -> None:
        self.ends += 1


def test_all_callbacks_end_if_one_fails(tmp_path: Path) -> None:
    counting = CountingCallback()
    with (
        pytest.raises(OSError, match="no space left"),
        EventDispatcher(tmp_path, [], [FailingCallback(), counting]),
    ):
        pass
    assert counting.ends == 1


# Step, name and value of the exported events; the loss of the last step is None.
SCALARS = [
    (300, "loss/training", 0.25),
    (300, "loss/test", 0.5),
    (300, "accuracy", 0.75),
    (2, "latency", 0.125),
]


def write_events(folder: Path, exporter: str) -> None:
    with EventDispatcher(folder, [exporter]) as run:
        for event in EVENTS:
            run.event(event)


@pytest.mark.parametrize("package", ["tensorboard", "mlflow", "wandb"])
def test_missing_package_of_exporter_is_reported_with_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    # Imports of None raise ModuleNotFoundError.
    for module in ("tensorboard.summary", package):
        monkeypatch.setitem(sys.modules, module, None)
    install = rf"pip install 'edge-testbed\[{package}\]'"
    message = f"--stream {package} needs {package}: {install}"
    with pytest.raises(InputError, match=message):
        write_events(tmp_path, package)


@pytest.mark.skipif(
    not importlib.util.find_spec("tensorboard"), reason="needs the extra `tensorboard`"
)
def test_tensorboard_reads_scalars_with_their_steps_and_times(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_events(tmp_path, "tensorboard")
    accumulator = EventAccumulator(str(tmp_path)).Reload()
    scalars = []
    times = {}
    for tag in accumulator.Tags()["tensors"]:
        for scalar in accumulator.Tensors(tag):
            value = scalar.tensor_proto.float_val[0]
            scalars.append((scalar.step, tag, value))
            times[tag] = scalar.wall_time
    assert sorted(scalars) == sorted(SCALARS)
    # The events are at 3.0 and 1.5 s.
    assert times["latency"] - times["loss/training"] == pytest.approx(1.5, abs=1e-3)


@pytest.mark.skipif(
    not importlib.util.find_spec("mlflow"), reason="needs the extra `mlflow`"
)
def test_mlflow_has_metrics_with_their_steps(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    write_events(tmp_path, "mlflow")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("testbed")
    (run,) = client.search_runs([experiment.experiment_id])
    scalars = []
    for _, name, _ in SCALARS:
        for metric in client.get_metric_history(run.info.run_id, name):
            scalars.append((metric.step, metric.key, metric.value))
    assert scalars == SCALARS


@pytest.mark.skipif(
    not importlib.util.find_spec("wandb"), reason="needs the extra `wandb`"
)
def test_wandb_run_is_stored_offline(tmp_path: Path) -> None:
    # `wandb sync` sends the run later.
    write_events(tmp_path, "wandb")
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


class RecordingCallback(Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_step(self, event: Event) -> None:
        self.calls.append(f"step {event.fields['step']}")

    def on_evaluate(self, event: Event) -> None:
        self.calls.append("evaluate")

    def on_fault(self, event: Event) -> None:
        self.calls.append(f"fault {event.fields['action']}")

    def on_end(self, run: Run | None) -> None:
        self.calls.append("failed" if run is None else run.outcome.status)


def test_callbacks_are_called_during_run(tmp_path: Path) -> None:
    overrides = {
        "workload.steps": 2,
        "workload.batch_size": 64,
        "workload.epochs": None,
        "expect": {},
        "faults": [{"throttle": {"device": "worker1", "slowdown": 2}, "at": "1ms"}],
    }
    callback = RecordingCallback()
    simulate(load("quickstart", overrides), tmp_path, callbacks=[callback])
    *during_run, last = callback.calls
    assert last == "finished"
    assert sorted(during_run) == ["evaluate", "fault throttle", "step 0", "step 1"]


def test_run_without_streams_writes_no_files(tmp_path: Path) -> None:
    with EventDispatcher(tmp_path, []) as run:
        for event in recorded.make_events():
            run.event(event)
    assert list(tmp_path.iterdir()) == []


def test_scenario_selects_exporters(tmp_path: Path) -> None:
    overrides = {"results": {"to": ["csv"]}, "workload.epochs": 1, "faults": []}
    simulate(load("quickstart", overrides), tmp_path / "run")
    stream = (tmp_path / "run" / "stream.csv").read_text()
    # The heading, at least one step and the evaluation.
    assert len(stream.splitlines()) >= 3
