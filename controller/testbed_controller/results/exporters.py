"""The registry of exporters: classes that follow a run in progress, and functions that write finished results."""

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
"""Function that writes runs into a folder; the last argument names the selected metrics (empty for all)."""


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
        """Handle the finished run; None after an error."""


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
_OTHER_NAMES = {"csv": "stream"}
"""``--stream csv`` writes ``stream.csv``; the exporter ``csv`` writes tables."""


def _is_live(exporter: Any) -> bool:
    return isinstance(exporter, type) and issubclass(exporter, Callback)


def stream_of(name: str) -> Callable[[Path], Callback]:
    """Return a live exporter by name. Raises `InputError` for an unknown name."""
    exporter: Callable[[Path], Callback] = EXPORTERS.find(_OTHER_NAMES.get(name, name))
    # Both kinds are in one registry, so that packages add either by one entry point.
    if not _is_live(exporter):
        raise InputError(
            f"--stream {name}: writes finished results: use 'testbed export RESULTS_DIR --format {name}'"
        )
    return exporter


def writer_of(name: str) -> Writer:
    """Return an exporter of finished results by name. Raises `InputError` for an unknown name."""
    writer: Writer = EXPORTERS.find(name)
    if _is_live(writer):
        raise InputError(
            f"--format {name}: follows a running experiment: use 'testbed run SCENARIO --stream {name}'"
        )
    return writer
