"""What a run learns, handed on as it happens: rows of CSV, loggers such as TensorBoard, and callbacks."""

from __future__ import annotations

import csv
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from testbed.common.lazy import need
from testbed.trace.events import Event
from testbed_controller.results.exporters import Callback, stream_of

if TYPE_CHECKING:
    from testbed_controller.results.run import Run

SCALARS: Mapping[str, Mapping[str, str]] = {
    "step": {"loss": "loss/training"},
    "evaluate": {"loss": "loss/test", "accuracy": "accuracy"},
    "request": {"latency": "latency"},
}
"""Events of the loggers, the fields that are written of each, and what these call them."""
FOLLOWED = (*SCALARS, "fault")
"""Events of callbacks."""
COLUMNS = ("time", "device", "event", "step", "loss", "accuracy", "latency")


class Logger(Callback, ABC):
    """Writes the scalars of steps, tests and requests, each with its step."""

    @abstractmethod
    def write(self, name: str, value: float, step: int, seconds: float) -> None:
        """Write a scalar of an instant of the run, seconds after its beginning."""

    def _scalars(self, event: Event) -> None:
        for key, name in SCALARS[event.event].items():
            value: Any = event.fields.get(key)
            if value is not None:
                self.write(name, float(value), _step(event), event.time)

    on_step = on_evaluate = on_request = _scalars


class Csv(Callback):
    """Writes ``stream.csv``, a row an event."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "stream.csv").open("w", newline="", encoding="utf-8", buffering=1)
        self._table = csv.DictWriter(self._file, COLUMNS, extrasaction="ignore")
        self._table.writeheader()

    def _row(self, event: Event) -> None:
        row = {"time": event.time, "device": event.device, "event": event.event, "step": _step(event)}
        self._table.writerow(row | {name: event.fields.get(name) for name in ("loss", "accuracy", "latency")})

    on_step = on_evaluate = on_request = _row

    def on_end(self, run: Run | None) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard(Logger):
    """Writes events for TensorBoard; their times are those of the run after its beginning here."""

    def __init__(self, folder: Path) -> None:
        library = need("tensorboard.summary", "tensorboard", "--stream tensorboard")
        self._began = time.time()
        self._writer = library.Writer(str(folder))

    def write(self, name: str, value: float, step: int, seconds: float) -> None:
        """Write a scalar, so that a TensorBoard that is open shows it."""
        self._writer.add_scalar(name, value, step, wall_time=self._began + seconds)
        self._writer.flush()

    def on_end(self, run: Run | None) -> None:
        """Close the file."""
        self._writer.close()


class MlFlow(Logger):
    """Logs to MLflow: to its server where MLFLOW_TRACKING_URI names one, else to ``mlflow.db`` in the results."""

    def __init__(self, folder: Path) -> None:
        library = need("mlflow", "mlflow", "--stream mlflow")
        named = library.get_tracking_uri() if library.is_tracking_uri_set() else None
        self._client = library.MlflowClient(named or f"sqlite:///{folder.resolve()}/mlflow.db")
        found = self._client.get_experiment_by_name("testbed")
        experiment = found.experiment_id if found else self._client.create_experiment("testbed")
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id

    def write(self, name: str, value: float, step: int, seconds: float) -> None:
        """Log a metric at its step; its time is that of the run in milliseconds."""
        self._client.log_metric(self._run, name, value, timestamp=int(1000 * seconds), step=step)

    def on_end(self, run: Run | None) -> None:
        """Log the scenario's name and say how the run ended."""
        if run is not None:
            self._client.set_tag(self._run, "scenario", run.trial.scenario.name)
        self._client.set_terminated(self._run, "FAILED" if run is None else "FINISHED")


class WeightsAndBiases(Logger):
    """Logs to Weights & Biases offline, into ``wandb`` in the results; `wandb sync` sends it on."""

    def __init__(self, folder: Path) -> None:
        library = need("wandb", "wandb", "--stream wandb")
        self._run = library.init(project="testbed", name=folder.name, dir=str(folder), mode="offline")

    def write(self, name: str, value: float, step: int, seconds: float) -> None:
        """Log a metric beside its step and its time in seconds: those of several devices may come out of order."""
        self._run.log({name: value, "at_step": step, "seconds": seconds})

    def on_end(self, run: Run | None) -> None:
        """Close it."""
        self._run.finish(exit_code=int(run is None))


class Following:
    """Hands the events of a run to callbacks, and within ``with`` its end.

    Callbacks are those of ``kinds``, names of exporters that write into a folder, and others. Raises `InputError` for
    a logger whose package is not installed.
    """

    def __init__(self, folder: Path, kinds: Iterable[str], callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = [*(stream_of(kind)(folder) for kind in kinds), *callbacks]
        self.finished: Run | None = None
        """To be set once the run lies in its folder."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._callbacks:
            each.on_end(self.finished)

    def event(self, event: Event) -> None:
        """Hand on an event, where callbacks have something for it."""
        if event.event in FOLLOWED:
            for each in self._callbacks:
                getattr(each, f"on_{event.event}")(event)


def _step(event: Event) -> int:
    return int(event.fields.get("step", event.fields.get("request", 0)))
