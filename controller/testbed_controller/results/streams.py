"""Live export of learning curves: CSV rows, loggers such as TensorBoard, and callbacks of users."""

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
from testbed_controller.results.exporters import Callback, find_stream

if TYPE_CHECKING:
    from testbed_controller.results.run import Run

SCALARS: Mapping[str, Mapping[str, str]] = {
    "step": {"loss": "loss/training"},
    "evaluate": {"loss": "loss/test", "accuracy": "accuracy"},
    "request": {"latency": "latency"},
}
"""Exported fields of each logged event, with the name of their curve in loggers."""
CALLBACK_EVENTS = (*SCALARS, "fault")
"""Events with a method in `Callback`."""
COLUMNS = ("time", "device", "event", "step", "loss", "accuracy", "latency")
"""Columns of ``stream.csv``."""


class Logger(Callback, ABC):
    """Base class of loggers for the scalars of steps, tests and requests."""

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
        # "sqlite:///" is the prefix of an address, and the absolute path adds a fourth slash.
        address = f"sqlite:///{folder.resolve()}/mlflow.db"
        if library.is_tracking_uri_set():
            address = library.get_tracking_uri()
        self._client = library.MlflowClient(address)
        experiment = self._client.get_experiment_by_name("testbed")
        experiment_id = experiment.experiment_id if experiment else None
        if experiment_id is None:
            experiment_id = self._client.create_experiment("testbed")
        run = self._client.create_run(experiment_id, run_name=folder.name)
        self._run_id = run.info.run_id

    def write(self, name: str, value: float, step: int, seconds: float) -> None:
        """Log a metric at a step; the timestamp is the time of the run in milliseconds."""
        self._client.log_metric(
            self._run_id, name, value, timestamp=int(1000 * seconds), step=step
        )

    def on_end(self, run: Run | None) -> None:
        """Log the scenario's name and the end status."""
        if run is not None:
            self._client.set_tag(self._run_id, "scenario", run.trial.scenario.name)
        status = "FAILED" if run is None else "FINISHED"
        self._client.set_terminated(self._run_id, status)


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
        """Close the logger, with a nonzero exit code after an error."""
        self._run.finish(exit_code=int(run is None))


class EventDispatcher:
    """Context manager passing the events of a run to callbacks, and the end of the run on exit.

    ``exporters`` names live exporters that write into ``folder``; ``callbacks`` are further receivers. Raises
    `InputError` for a logger whose package is not installed.
    """

    def __init__(
        self, folder: Path, exporters: Iterable[str], callbacks: Sequence[Callback] = ()
    ) -> None:
        self._callbacks: list[Callback] = []
        for name in exporters:
            create = find_stream(name)
            self._callbacks.append(create(folder))
        self._callbacks += callbacks
        self.finished: Run | None = None
        """The stored run, which the caller sets before the end; None after an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            # All callbacks are called even if one raises, as the others have files to close. The stack calls in reverse
            # order, so the first callback is pushed last.
            for each in reversed(self._callbacks):
                stack.callback(each.on_end, self.finished)

    def event(self, event: Event) -> None:
        """Pass an event to each callback's method for the event type, for example `Callback.on_step`."""
        if event.event in CALLBACK_EVENTS:
            for each in self._callbacks:
                handle = getattr(each, f"on_{event.event}")
                handle(event)


def _step_of_event(event: Event) -> int:
    """Return the step number of an event, or the request number in inference."""
    return int(event.fields.get("step", event.fields.get("request", 0)))
