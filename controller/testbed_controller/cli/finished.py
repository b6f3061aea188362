"""Output and exit status of finished runs, for `testbed run` and `testbed report`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from testbed.common.errors import (
    DivergedError,
    ExpectationError,
    StoppedError,
    TestbedError,
)

if TYPE_CHECKING:
    from testbed_controller.results.run import Run


@contextmanager
def explaining(console: Console) -> Iterator[None]:
    """Print the measured links if the links cause the rejection of a run in the block."""
    from testbed_controller.report.tables import draw_section
    from testbed_controller.report.terminal import measurements_table
    from testbed_controller.running.fidelity import LinksError

    try:
        yield
    except LinksError as error:
        console.print(
            draw_section(measurements_table(error.measurements), console.width)
        )
        raise


def show_run(console: Console, finished: Run, *, brief: bool) -> None:
    """Print the results of a run; with ``brief``, a finished run in one or two lines."""
    from testbed_controller.report.terminal import show, show_briefly

    if brief and finished.outcome.status == "finished":
        show_briefly(console, finished)
    else:
        show(console, finished)


def summarize(folder: Path, runs: list[Run], console: Console) -> dict[str, Any]:
    """Write, print and return the summary of all runs in a folder."""
    from testbed_controller.report import sweep
    from testbed_controller.results import summary

    content = summary.summarize(folder, runs)
    sweep.write(folder, content, runs)
    sweep.show(console, content, folder)
    return content


def _error_reason(error: str) -> str:
    """Return the most informative line of an error: the last one of a traceback, else the first."""
    lines = error.strip().splitlines() or ["the reason is unknown"]
    return lines[-1] if "Traceback" in error else lines[0]


def judge(runs: list[Run]) -> None:
    """Raise the error for the exit status: a failed or diverged run, or a failed expectation."""
    # In the order of importance: an unfinished run misses expectations only because it has not finished.
    for finished in runs:
        _check_finished(finished)
    diverged = []
    for finished in runs:
        if _has_diverged(finished):
            reason = finished.metrics["divergence"]
            diverged.append(f"{finished.path.name} ({reason})")
    if diverged:
        text = "the loss is not a finite number; try a smaller learning_rate, or expect `diverged`"
        raise DivergedError(f"training diverged: {', '.join(diverged)}: {text}")
    unmet = []
    for finished in runs:
        prefix = f"{finished.path.name}: " if len(runs) > 1 else ""
        unmet += [prefix + text for text in _unmet_expectations(finished)]
    if unmet:
        raise ExpectationError("; ".join(unmet))


def _check_finished(run: Run) -> None:
    """Raise the error of an unfinished run."""
    status = run.outcome.status
    if status == "finished":
        return
    reason = _error_reason(run.outcome.error or "")
    text = f"{reason}; partial results are in {run.path}"
    if status == "interrupted":
        raise StoppedError(f"the run was interrupted: {text}")
    raise TestbedError(f"the run {status}: {text}")


def _has_diverged(run: Run) -> bool:
    """Return whether a run diverged without an expectation about divergence."""
    if not run.metrics.get("diverged"):
        return False
    return all(each.key != "diverged" for each in run.expectations)


def _unmet_expectations(run: Run) -> Iterator[str]:
    from testbed_controller.report.sections import result_text

    for expectation in run.expectations:
        if not expectation.holds:
            actual = result_text(expectation, run)
            yield f"{expectation.key} is {actual}, expected {expectation.condition}"
