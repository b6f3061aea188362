"""The public Python interface, equivalent to the command line; users import ``testbed``.

Errors are those of `testbed.common.errors`: `InputError` reports in one line a mistake and its correction.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from rich.console import Console

from testbed.common import usercode
from testbed.common.errors import InputError, TestbedError
from testbed.common.lazy import require_extra
from testbed.prepare import Prepared, prepare, prepare_all
from testbed.scenario import loading
from testbed.scenario.expand import trials
from testbed.scenario.schema import TOGETHER, Scenario, Source
from testbed_controller.api.execution import RunOptions, Runtime, run_recorded
from testbed_controller.api.executors import Executor, InTurn, PlannedRun
from testbed_controller.results import files
from testbed_controller.results.exporters import Callback
from testbed_controller.results.recorder import create_numbered_folder
from testbed_controller.results.rows import Row, frame, points, rows
from testbed_controller.results.run import Run, run_name, run_names

if TYPE_CHECKING:
    import pandas as pd
    from distributed import Client
    from matplotlib.figure import Figure

    from testbed.scenario.schema import Trial

__all__ = [
    "Callback",
    "InputError",
    "Live",
    "Result",
    "Results",
    "TestbedError",
    "build",
    "emulate",
    "live",
    "load",
    "open_results",
    "run",
    "simulate",
    "sweep",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """The results of a finished run: metrics, tables and plots.

    >>> import testbed
    >>> result = testbed.simulate(testbed.load("smoke/single-mlp", {"workload.epochs": 1, "expect": {}}))
    >>> result.metrics["steps"]
    44
    >>> [row["step"] for row in result.rows("steps")][:3]
    [0, 1, 2]
    >>> result.plot("Loss").savefig("loss.svg")
    """

    run: Run
    """Plan, outcome and manifest of the run."""

    @property
    def path(self) -> Path:
        """The results folder."""
        return self.run.path

    @property
    def metrics(self) -> dict[str, Any]:
        """Scalar metrics by name; see `docs/metrics.md` and `testbed show methods` for their meaning."""
        return {row["metric"]: row["value"] for row in rows(self.run, "metrics")}

    def rows(self, table: str) -> list[Row]:
        """Return a table: metrics, events, devices, links, steps, evaluations, requests or faults."""
        return rows(self.run, table)

    def frame(self, table: str) -> pd.DataFrame:
        """Return a table as a pandas frame."""
        return frame(self.rows(table))

    @property
    def plots(self) -> dict[str, Figure]:
        """Matplotlib plots of the report by title, which notebooks display and `savefig` writes to files.

        Raises `InputError` if matplotlib (the extra ``plots``) is not installed.
        """
        require_extra("matplotlib", "plots", "drawing plots")
        from testbed_controller.report.drawing import draw
        from testbed_controller.report.html import charts

        plots = {}
        for title, _, plot in charts(self.run):
            if plot is not None:
                plots[title] = draw(plot)
        return plots

    def plot(self, title: str) -> Figure:
        """Return a plot by title. Raises `InputError` listing the available titles."""
        plots = self.plots
        if title not in plots:
            raise InputError(
                f"unknown plot '{title}': choose one of {', '.join(plots)}"
            )
        return plots[title]

    def __str__(self) -> str:
        from testbed_controller.report.terminal import show

        text = StringIO()
        show(Console(file=text, width=100, highlight=False), self.run)
        return text.getvalue()

    __repr__ = __str__


class Results(list[Result]):
    """The runs of a sweep, in order.

    >>> import testbed
    >>> scenario = testbed.load("smoke/single-mlp", {"workload.epochs": 1, "expect": {}})
    >>> results = testbed.sweep(scenario, {"seed": [1, 2]})
    >>> [row["seed"] for row in results.rows()]
    [1, 2]
    """

    refused: Sequence[str] = ()
    """Error text of each rejected point, with its seed."""

    def rows(self) -> list[Row]:
        """Return a row for each run, with the swept values and the metrics."""
        return points([each.run for each in self])

    def frame(self) -> pd.DataFrame:
        """Return these rows as a pandas frame."""
        return frame(self.rows())


@dataclass(frozen=True)
class Live:
    """A run in progress, or a lab without one.

    >>> import testbed
    >>> lab = testbed.live()  # doctest: +SKIP
    >>> lab.state()["devices"]  # doctest: +SKIP
    {'source': 'up', 'worker1': 'up'}
    >>> handle = lab.strike(kill="worker1")  # doctest: +SKIP
    >>> lab.undo(handle)  # doctest: +SKIP
    """

    run: str
    """Name of the run, as in `testbed ps`."""

    def state(self) -> dict[str, Any]:
        """Return ``devices`` with their states (up, down or paused), and ``in_force``, the active faults by handle."""
        return self._ask_lab({"show": None})

    def strike(self, **action: Any) -> str:
        """Apply an action in scenario form, for example ``kill="worker1"``; return the handle for `undo`.

        Raises `InputError` for an action that a scenario could not have either.
        """
        return str(self._ask_lab({"strike": action})["handle"])

    def undo(self, handle: str) -> None:
        """Revert an action. Raises `InputError` for an inactive handle."""
        self._ask_lab({"undo": handle})

    def _ask_lab(self, request: dict[str, Any]) -> dict[str, Any]:
        from testbed_controller.running.control import connect

        return connect(self.run)(request)


def live(run: str | None = None) -> Live:
    """Return a run in progress, by default the only one.

    Raises `InputError` if no run is in progress, or if ``run`` is missing and several are.

    >>> import testbed
    >>> testbed.live().strike(partition=[["source"], ["worker1"]])  # doctest: +SKIP
    'a1'
    """
    from testbed_controller.lab import runstate

    return Live(runstate.choose(run))


def load(scenario: str | Path, changes: Mapping[str, Any] | None = None) -> Scenario:
    """Load a scenario from a file, or by name from ``scenarios/``, and change some dotted keys.

    Raises `InputError` with file, line and key of each mistake.

    >>> import testbed
    >>> testbed.load("quickstart", {"seed": 7}).seed
    7
    """
    # A notebook may have changed the user's files since the last scenario.
    usercode.clear_cache()
    overrides = []
    for key, value in (changes or {}).items():
        try:
            text = json.dumps(value, default=_as_plain_value)
        except TypeError:
            raise InputError(
                f"{key}: values of type {type(value).__name__} cannot be written into a scenario: use numbers, texts, "
                "lists and dictionaries"
            ) from None
        overrides.append(f"{key}={text}")
    return loading.load(scenario, overrides)


def _as_plain_value(value: Any) -> Any:
    """Return a path as text, and a number or array of numpy as plain numbers. Raises TypeError for other objects."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(type(value).__name__)


def build(**keys: Any) -> Scenario:
    """Build a scenario from keys; file names are relative to the working directory.

    >>> import testbed
    >>> scenario = testbed.build(
    ...     name="tiny",
    ...     devices={"alone": {"profile": "laptop"}},
    ...     workload={"model": {"name": "mlp"}, "data": {"name": "digits"}, "method": {"name": "single"}, "steps": 4},
    ... )
    >>> list(scenario.devices)
    ['alone']
    """
    usercode.clear_cache()
    return loading.validate(keys, Source("scenario"))


def run(
    scenario: Scenario,
    out: str | Path | None = None,
    *,
    runtime: Runtime = "emulate",
    **options: Any,
) -> Result:
    """Run a scenario as `testbed run` does: in containers by default, or on the virtual clock.

    ``options`` are those of `emulate` or `simulate`.

    >>> import testbed
    >>> scenario = testbed.load("smoke/single-mlp", {"workload.epochs": 1, "expect": {}})
    >>> testbed.run(scenario, runtime="simulate").metrics["steps"]
    44
    """
    _check_runtime(runtime)
    execute = {"emulate": emulate, "simulate": simulate}[runtime]
    return execute(scenario, out, **options)


def _check_runtime(runtime: str) -> None:
    runtimes = get_args(Runtime)
    if runtime not in runtimes:
        raise InputError(
            f"unknown runtime '{runtime}': choose one of {', '.join(runtimes)}"
        )


def simulate(
    scenario: Scenario,
    out: str | Path | None = None,
    *,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Run a scenario on the virtual clock; results are written to ``out``, by default ``results/<name>``.

    ``callbacks`` are called with steps, tests, requests, faults and the end in the order of events.

    >>> import testbed
    >>> scenario = testbed.load("smoke/single-mlp", {"workload.epochs": 1, "expect": {}})
    >>> testbed.simulate(scenario, "one").path.name
    'one'
    """
    return _run_one(scenario, "simulate", out, RunOptions(callbacks=callbacks))


def emulate(
    scenario: Scenario,
    out: str | Path | None = None,
    *,
    links: str = "auto",
    accept_links: bool = False,
    keep: bool = False,
    hosts: Sequence[str] = (),
    place: Mapping[str, str] | None = None,
    lab: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Run a scenario in containers with the options of `testbed run`; ``callbacks`` is as in `simulate`.

    >>> import testbed
    >>> result = testbed.emulate(testbed.load("quickstart"), accept_links=True)  # doctest: +SKIP
    >>> result.metrics["accuracy"]  # doctest: +SKIP
    0.9
    """
    from testbed_controller.hosts.lab import add_host_faults
    from testbed_controller.hosts.placement import read_lab

    placement = read_lab(None if lab is None else Path(lab), tuple(hosts), place)
    options = RunOptions(
        callbacks=callbacks,
        links=links,
        accept_links=accept_links,
        keep=keep,
        placement=placement,
    )
    if not placement.faults:
        return _run_one(scenario, "emulate", out, options)

    def with_host_faults(trial: Trial) -> Trial:
        [changed] = add_host_faults([trial], placement)
        return changed

    return _run_one(scenario, "emulate", out, options, with_host_faults)


def sweep(
    scenario: Scenario,
    values: Mapping[str, Sequence[Any]] | None = None,
    out: str | Path | None = None,
    *,
    runtime: Runtime = "simulate",
    together: bool = False,
    cluster: Client | str | None = None,
) -> Results:
    """Run a scenario at all combinations of ``values`` (key -> values), by default at the scenario's sweep points.

    ``together`` takes the first values of all keys, then the second ones, and so on. ``cluster`` is a
    `dask.distributed.Client`, or the address of its scheduler, on whose workers the runs are simulated.
    Raises `InputError` for runs in containers there.

    >>> import testbed
    >>> scenario = testbed.load("smoke/single-mlp", {"workload.epochs": 1, "expect": {}})
    >>> results = testbed.sweep(scenario, {"workload.batch_size": [32, 64]})
    >>> [result.metrics["steps"] for result in results]
    [44, 22]
    """
    _check_runtime(runtime)
    if values is not None:
        lists: dict[str, Any] = {}
        for key, swept in values.items():
            lists[key] = _list_of(key, swept)
        # These values replace the sweep and the points of the scenario.
        tree = scenario.model_dump(mode="json", by_alias=True, exclude_none=True)
        tree["sweep"] = {TOGETHER: lists} if together else lists
        tree["points"] = []
        scenario = loading.validate(tree, scenario.source)
    planned = trials(scenario)
    prepared, refused = prepare_all(planned)
    folder = (
        Path(out)
        if out is not None
        else create_numbered_folder(Path("results") / scenario.name)
    )
    names = run_names(planned)
    runs = {}
    for number, prepared_run in prepared.items():
        runs[number] = PlannedRun(prepared_run, folder / names[number])
    executor: Executor = InTurn(runtime)
    if cluster is not None:
        if runtime != "simulate":
            raise InputError(
                "cluster: containers need a host to themselves: runtime must be 'simulate'"
            )
        from testbed_controller.api.cluster import Cluster

        executor = Cluster(cluster)
    finished: dict[int, Run] = {}
    _in_its_own_loop(
        lambda: executor.execute(runs, _silent_console(), finished.__setitem__)
    )
    results = Results(Result(finished[number]) for number in sorted(finished))
    results.refused = refused
    return results


def _list_of(key: str, values: Any) -> list[Any]:
    """Return the values of a swept key. Raises `InputError` for a single value."""
    # A text would become a list of its letters.
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InputError(
            f"the values of '{key}' must be a list, such as [{values!r}], not a single value"
        )
    plain_values = []
    for value in values:
        # Numbers of numpy, as from `np.linspace`, cannot be written into a scenario.
        is_of_numpy = hasattr(value, "tolist")
        plain_values.append(_as_plain_value(value) if is_of_numpy else value)
    return plain_values


def open_results(folder: str | Path) -> Results:
    """Open a results folder: one run, or all runs of a sweep.

    Runs with ``--no-events`` have metrics, and no tables of events.

    >>> import testbed
    >>> scenario = testbed.load("smoke/single-mlp", {"workload.epochs": 1, "expect": {}})
    >>> result = testbed.simulate(scenario, "results/kept")
    >>> testbed.open_results("results/kept")[0].metrics["steps"]
    44
    """
    folders = files.run_folders(Path(folder))
    return Results(Result(files.load_any(each)) for each in folders)


def _run_one(
    scenario: Scenario,
    runtime: Runtime,
    out: str | Path | None,
    options: RunOptions,
    change: Callable[[Trial], Trial] | None = None,
) -> Result:
    """Run the only trial of a scenario, after applying ``change``; raises `InputError` for a scenario of several."""
    from testbed_controller.running.inputs import InitialWeights

    runs = trials(scenario)
    if len(runs) > 1:
        raise InputError(
            f"{scenario.name} has {len(runs)} runs: use sweep(), or remove its sweep and repetitions"
        )
    prepared: Prepared = prepare(change(runs[0]) if change else runs[0])
    if out is None:
        out = create_numbered_folder(Path("results") / run_name(prepared.trial))
    folder = Path(out)
    silent = _silent_console()
    initial = InitialWeights(silent)
    run = _in_its_own_loop(
        lambda: run_recorded(prepared, runtime, folder, initial, silent, options)
    )
    return Result(run)


def _silent_console() -> Console:
    return Console(file=StringIO())


def _in_its_own_loop(act: Callable[[], T]) -> T:
    """Run a function starting an event loop; in a new thread if the current one runs a loop, as in a notebook."""
    # A thread cannot run an event loop within another one.
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return act()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(act).result()
