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
from testbed_controller.results.streams import Following
from tests.helpers import recorded

EVENTS = [
    Event(1.0, "a", "compute", {"span": "forward"}),
    Event(1.5, "a", "step", {"step": 300, "loss": 0.25, "samples": 8}),
    Event(2.5, "a", "evaluate", {"step": 300, "loss": 0.5, "accuracy": 0.75}),
    Event(3.0, "b", "request", {"request": 2, "latency": 0.125}),
    Event(4.0, "a", "step", {"step": 301, "loss": None, "samples": 8}),
]


def test_rows_are_there_as_they_come(tmp_path: Path) -> None:
    with Following(tmp_path, ["csv"]) as run:
        for count, event in enumerate(EVENTS):
            run.event(event)
            assert len((tmp_path / "stream.csv").read_text().splitlines()) == count + 1
    with (tmp_path / "stream.csv").open() as file:
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
    """A callback that cannot end."""

    def on_end(self, run: Run | None) -> None:
        raise OSError("no space left")


class CountingCallback(Callback):
    """A callback that counts its ends."""

    ends = 0

    def on_end(self, run: Run | None) -> None:
        self.ends += 1


def test_all_callbacks_end_if_one_of_them_fails(tmp_path: Path) -> None:
    counting = CountingCallback()
    with (
        pytest.raises(OSError, match="no space left"),
        Following(tmp_path, [], [FailingCallback(), counting]),
    ):
        pass
    assert counting.ends == 1


SCALARS = [
    (300, "loss/training", 0.25),
    (300, "loss/test", 0.5),
    (300, "accuracy", 0.75),
    (2, "latency", 0.125),
]


def write(folder: Path, kind: str) -> None:
    with Following(folder, [kind]) as run:
        for event in EVENTS:
            run.event(event)


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow", "wandb"])
def test_a_logger_whose_package_is_missing_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for name in ("tensorboard.summary", kind):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        InputError,
        match=rf"--stream {kind} needs {kind}: pip install 'edge-testbed\[{kind}\]'",
    ):
        write(tmp_path, kind)


@pytest.mark.skipif(
    not importlib.util.find_spec("tensorboard"), reason="needs the extra `tensorboard`"
)
def test_tensorboard_reads_scalars_with_their_steps_and_times(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, "tensorboard")
    found = EventAccumulator(str(tmp_path)).Reload()
    read = [
        (each.step, tag, found.Tensors(tag))
        for tag in found.Tags()["tensors"]
        for each in found.Tensors(tag)
    ]
    values = [
        (step, tag, each[0].tensor_proto.float_val[0]) for step, tag, each in read
    ]
    assert sorted(values) == sorted(SCALARS)
    times = {tag: each[0].wall_time for _, tag, each in read}
    assert times["latency"] - times["loss/training"] == pytest.approx(1.5, abs=1e-3)


@pytest.mark.skipif(
    not importlib.util.find_spec("mlflow"), reason="needs the extra `mlflow`"
)
def test_mlflow_has_metrics_with_their_steps(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    write(tmp_path, "mlflow")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs(
        [client.get_experiment_by_name("testbed").experiment_id]
    )
    names = [name for _, name, _ in SCALARS]
    found = [
        (each.step, each.key, each.value)
        for name in names
        for each in client.get_metric_history(run.info.run_id, name)
    ]
    assert found == SCALARS


@pytest.mark.skipif(
    not importlib.util.find_spec("wandb"), reason="needs the extra `wandb`"
)
def test_weights_and_biases_keeps_a_run_to_be_sent_later(tmp_path: Path) -> None:
    write(tmp_path, "wandb")
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


class Seen(Callback):
    def __init__(self) -> None:
        self.names: list[str] = []

    def on_step(self, event: Event) -> None:
        self.names.append(f"step {event.fields['step']}")

    def on_evaluate(self, event: Event) -> None:
        self.names.append("evaluate")

    def on_fault(self, event: Event) -> None:
        self.names.append(f"fault {event.fields['action']}")

    def on_end(self, run: Run | None) -> None:
        self.names.append("failed" if run is None else run.outcome.status)


def test_callbacks_see_a_run_as_it_goes_on(tmp_path: Path) -> None:
    keys = {"workload.steps": 2, "workload.batch_size": 64, "expect": {}}
    seen = Seen()
    faults = [{"throttle": {"device": "worker1", "slowdown": 2}, "at": "1ms"}]
    simulate(
        load("quickstart", {**keys, "faults": faults, "workload.epochs": None}),
        tmp_path,
        callbacks=[seen],
    )
    assert seen.names[-1] == "finished"
    assert sorted(seen.names[:-1]) == sorted(
        ["fault throttle", "step 0", "step 1", "evaluate"]
    )


def test_a_run_without_streams_writes_none(tmp_path: Path) -> None:
    with Following(tmp_path, []) as run:
        for event in recorded.make_events():
            run.event(event)
    assert list(tmp_path.iterdir()) == []


def test_a_scenario_says_where_its_results_go(tmp_path: Path) -> None:
    keys = {"results": {"to": ["csv"]}, "workload.epochs": 1, "faults": []}
    simulate(load("quickstart", keys), tmp_path / "run")
    assert len((tmp_path / "run" / "stream.csv").read_text().splitlines()) >= 3
