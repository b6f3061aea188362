"""The registry of exporters: live exporters, which follow a run in progress, and writers of finished results.

A live exporter is a class derived from `Callback`; `testbed run --stream NAME` creates an instance with the results
folder. A writer is a function, which `testbed export --format NAME` calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from testbed.common.errors import InputError
from testbed.common.plugins import Registry

if TYPE_CHECKING:
    from testbed.trace.events import Event
    from testbed_controller.results.run import Run

Writer: TypeAlias = "Callable[[Sequence[Run], Path, Sequence[str]], None]"
"""Function of runs, destination folder and names of selected metrics (empty for all), which writes files."""


class Callback:
    """Receiver of the events of a run in progress, in order. Subclasses override the methods of interest.

    An event has a `time` in seconds of the run, a `device`, and `fields`, such as `step` and `loss`.

    >>> import testbed
    >>> class Count(testbed.Callback):
    ...     steps = 0
    ...     def on_step(self, event):
    ...         self.steps += 1
    >>> count = Count()
    >>> scenario = testbed.load("smoke/single-mlp", {"workload.epochs": 1, "expect": {}})
    >>> result = testbed.simulate(scenario, callbacks=[count])
    >>> count.steps
    44
    """

    def on_step(self, event: Event) -> None:
        """Handle a finished training step."""

    def on_evaluate(self, event: Event) -> None:
        """Handle a test of the model."""

    def on_request(self, event: Event) -> None:
        """Handle an answer of an inference."""

    def on_fault(self, event: Event) -> None:
        """Handle an injected fault."""

    def on_end(self, run: Run | None) -> None:
        """Handle the end of the run; ``run`` is None after an error."""


def _require_callable(candidate: Any) -> Any:
    if not callable(candidate):
        raise TypeError(
            f"{candidate!r} must be a function, or a class derived from testbed.Callback"
        )
    return candidate


EXPORTERS = Registry(
    "testbed.exporters",
    {
        "csv": "testbed_controller.report.exporters:write_csv",
        "parquet": "testbed_controller.report.exporters:write_parquet",
        "perfetto": "testbed_controller.report.exporters:write_perfetto",
        "plots": "testbed_controller.report.exporters:write_plots",
        "latex": "testbed_controller.report.exporters:write_latex",
        "stream": "testbed_controller.results.streams:Csv",
        "tensorboard": "testbed_controller.results.streams:TensorBoard",
        "mlflow": "testbed_controller.results.streams:MlFlow",
        "wandb": "testbed_controller.results.streams:WeightsAndBiases",
    },
    "exporter",
    _require_callable,
)
_LIVE_NAMES = {"csv": "stream"}
"""Registered names of live exporters whose name on the command line belongs to a writer: `--stream csv`."""


def _is_live(exporter: Any) -> bool:
    return isinstance(exporter, type) and issubclass(exporter, Callback)


def find_stream(name: str) -> Callable[[Path], Callback]:
    """Return a live exporter by name. Raises `InputError` for an unknown name."""
    exporter: Callable[[Path], Callback] = EXPORTERS.find(_LIVE_NAMES.get(name, name))
    # One registry contains both kinds, so that packages add either by one group of entry points.
    if not _is_live(exporter):
        raise InputError(
            f"--stream {name}: writes finished results: use 'testbed export RESULTS_DIR --format {name}'"
        )
    return exporter


def find_writer(name: str) -> Writer:
    """Return an exporter of finished results by name. Raises `InputError` for an unknown name."""
    writer: Writer = EXPORTERS.find(name)
    if _is_live(writer):
        raise InputError(
            f"--format {name}: follows a running experiment: use 'testbed run SCENARIO --stream {name}'"
        )
    return writer
