"""Live export of learning curves: CSV rows, loggers such as TensorBoard, and callbacks."""

from __future__ import annotations

import csv
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from testbed.common.lazy import require_extra
from testbed.trace.events import Event
from testbed_controller.results.exporters import Callback, stream_of

if TYPE_CHECKING:
    from testbed_controller.results.run import Run

SCALARS: Mapping[str, Mapping[str, str]] = {
    "step": {"loss": "loss/training"},
    "evaluate": {"loss": "loss/test", "accuracy": "accuracy"},
    "request": {"latency": "latency"},
}
"""Logged events with their exported fields and names."""
FOLLOWED = (*SCALARS, "fault")
"""Events of callbacks."""
COLUMNS = ("time", "device", "event", "step", "loss", "accuracy", "latency")


class Logger(Callback, ABC):
    """Base of loggers for the scalars of steps, tests and requests."""

    @abstractmethod
    def write(self, name: str, value: float, step: int, seconds: float) -> None:
        """Log a scalar at a step and a time in seconds of the run."""

    def _write_scalars(self, event: Event) -> None:
        for key, name in SCALARS[event.event].items():
            value: Any = event.fields.get(key)
            if value is not None:
                self.write(name, float(value), _step_of_event(event), event.time)

    on_step = on_evaluate = on_request = _write_scalars


class Csv(Callback):
    """Writer of ``stream.csv``, with one row per event."""

    def __init__(self, folder: Path) -> None:
        # Buffered by line, so that a program that follows the file sees whole rows at once.
        self._file = (folder / "stream.csv").open(
            "w", newline="", encoding="utf-8", buffering=1
        )
        self._table = csv.DictWriter(self._file, COLUMNS, extrasaction="ignore")
        self._table.writeheader()

    def _write_row(self, event: Event) -> None:
        row: dict[str, Any] = {
            "time": event.time,
            "device": event.device,
            "event": event.event,
            "step": _step_of_event(event),
        }
        for name in ("loss", "accuracy", "latency"):
            row[name] = event.fields.get(name)
        self._table.writerow(row)

    on_step = on_evaluate = on_request = _write_row

    def on_end(self, run: Run | None) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard(Logger):
    """Logger to TensorBoard; times count from the start of the run on this machine."""

    def __init__(self, folder: Path) -> None:
        library = require_extra(
            "tensorboard.summary", "tensorboard", "--stream tensorboard"
        )
        self._began = time.time()
        self._writer = library.Writer(str(folder))

    def write(self, name: str, value: float, step: int, seconds: float) -> None:
        """Log a scalar and flush, so that an open TensorBoard displays the value."""
        self._writer.add_scalar(name, value, step, wall_time=self._began + seconds)
        self._writer.flush()

    def on_end(self, run: Run | None) -> None:
        """Close the file."""
        self._writer.close()


class MlFlow(Logger):
    """Logger to MLflow: to the server in MLFLOW_TRACKING_URI, else to ``mlflow.db`` in the results."""

    def __init__(self, folder: Path) -> None:
        library = require_extra("mlflow", "mlflow", "--stream mlflow")
        # An absolute path: three slashes are part of an SQLite address, and the fourth begins the path.
        address = f"sqlite:///{folder.resolve()}/mlflow.db"
        if library.is_tracking_uri_set():
            address = library.get_tracking_uri()
        self._client = library.MlflowClient(address)
        experiment = self._client.get_experiment_by_name("testbed")
        number = experiment.experiment_id if experiment else None
        if number is None:
            number = self._client.create_experiment("testbed")
        run = self._client.create_run(number, run_name=folder.name)
        self._run = run.info.run_id

    def write(self, name: str, value: float, step: int, seconds: float) -> None:
        """Log a metric at a step; the timestamp is the time of the run in milliseconds."""
        self._client.log_metric(
            self._run, name, value, timestamp=int(1000 * seconds), step=step
        )

    def on_end(self, run: Run | None) -> None:
        """Log the scenario's name and the end status."""
        if run is not None:
            self._client.set_tag(self._run, "scenario", run.trial.scenario.name)
        self._client.set_terminated(self._run, "FAILED" if run is None else "FINISHED")


class WeightsAndBiases(Logger):
    """Offline logger to Weights & Biases, in ``wandb`` of the results; upload with `wandb sync`."""

    def __init__(self, folder: Path) -> None:
        library = require_extra("wandb", "wandb", "--stream wandb")
        self._run = library.init(
            project="testbed", name=folder.name, dir=str(folder), mode="offline"
        )

    def write(self, name: str, value: float, step: int, seconds: float) -> None:
        """Log a metric with step and time as values, because steps of several devices may be out of order."""
        self._run.log({name: value, "at_step": step, "seconds": seconds})

    def on_end(self, run: Run | None) -> None:
        """Close the logger."""
        self._run.finish(exit_code=int(run is None))


class Following:
    """Passes the events of a run to callbacks and, as a context manager, the end of the run.

    ``kinds`` names exporters that write into ``folder``; ``callbacks`` are further receivers. Raises `InputError` for a
    logger whose package is not installed.
    """

    def __init__(
        self, folder: Path, kinds: Iterable[str], callbacks: Sequence[Callback] = ()
    ) -> None:
        self._callbacks = [*(stream_of(kind)(folder) for kind in kinds), *callbacks]
        self.finished: Run | None = None
        """The finished run, set by the caller once stored."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            # All callbacks are called, the first of them first, even if one raises: the others have files to close.
            for each in reversed(self._callbacks):
                stack.callback(each.on_end, self.finished)

    def event(self, event: Event) -> None:
        """Pass an event to interested callbacks."""
        if event.event in FOLLOWED:
            for each in self._callbacks:
                getattr(each, f"on_{event.event}")(event)


def _step_of_event(event: Event) -> int:
    """Return the number of an event's step, or of its request in inference."""
    return int(event.fields.get("step", event.fields.get("request", 0)))
