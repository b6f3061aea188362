"""Compare the metrics of scenarios at this revision with those at another revision, to the bit.

    python tools/same_figures.py REVISION [--keep FOLDER] [NAME ...]

Each scenario whose name contains one of NAME (default: every scenario) is simulated in both checkouts. Scenarios of
papers are shortened, to two points of a sweep and one repetition. Differences are printed, and cause exit status 1.
``--keep`` stores the metrics of the other revision in a folder, and uses the stored metrics the next time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from testbed.common import yamltext

COMMAND = "from testbed_controller.cli.main import main; main()"
"""Python program that runs the command line of the checkout in PYTHONPATH."""
HERE = Path(__file__).resolve().parents[1]
"""Folder of this checkout."""
MAX_WORK = {"steps": 24, "epochs": 1, "requests": 3}
"""Maximum amounts of work of a shortened scenario, by key of `workload`."""
SHORT_OPTIONS = {"training_time": "60s", "test_runs": 4}
"""Values of method options in a shortened scenario."""


def shorten(scenario: dict[str, Any]) -> dict[str, Any]:
    """Return a paper's scenario that runs in seconds: little work, the first and last point, no expectations.

    >>> shorten({"workload": {"steps": 500}, "expect": {"steps": "== 500"}})
    {'workload': {'steps': 24}, 'repetitions': 1}
    """
    _shorten_work(scenario["workload"])
    steps = scenario["workload"].get("steps")
    for fault in scenario.get("faults", ()):
        moment = fault.get("when")
        # A fault at a batch that the shortened run never reaches would be rejected.
        if steps is not None and isinstance(moment, dict) and "batch" in moment:
            moment["batch"] = min(moment["batch"], steps // 2)
    for key in ("points", "sweep"):
        points = scenario.get(key)
        if isinstance(points, list):
            # The first and the last point.
            scenario[key] = points[:: max(len(points) - 1, 1)]
    sweep = scenario.get("sweep")
    if isinstance(sweep, dict):
        for key, values in sweep.items():
            sweep[key] = values[:1] if isinstance(values, list) else values
    scenario.pop("expect", None)
    # Older revisions have the publication in the scenario.
    scenario.pop("paper", None)
    return scenario | {"repetitions": 1}


def _shorten_work(work: dict[str, Any]) -> None:
    for key, maximum in MAX_WORK.items():
        if isinstance(work.get(key), int):
            work[key] = min(work[key], maximum)
    method = work.get("method", {})
    for key, value in SHORT_OPTIONS.items():
        if key in method:
            method[key] = value


def code_path(checkout: Path) -> str:
    """Return a PYTHONPATH with the packages of a checkout, which then precede the installed packages."""
    folders = [
        checkout,
        checkout / "agent",
        checkout / "controller",
        *checkout.glob("papers/*"),
    ]
    return os.pathsep.join(map(str, folders))


def scenario_files(checkout: Path) -> dict[str, Path]:
    """Return the scenario files of a checkout by their names for `testbed run`."""
    files = {}
    for file in checkout.glob("scenarios/**/*.yaml"):
        name = file.relative_to(checkout / "scenarios").with_suffix("")
        files[name.as_posix()] = file
    for file in checkout.glob("papers/*/scenarios/*.yaml"):
        files[f"papers/{file.stem}"] = file
    return files


def simulate_metrics(checkout: Path, file: Path, folder: Path) -> dict[str, Any]:
    """Return the metrics of each run of a scenario, simulated by the code in ``checkout``.

    Raises RuntimeError if the scenario has no results.
    """
    scenario = file
    if "papers" in file.relative_to(checkout).parts:
        scenario = _write_shortened(file, folder)
    results = folder / "results"
    command = [sys.executable, "-c", COMMAND, "run", str(scenario)]
    command += ["--runtime", "simulate", "--out", str(results)]
    process = subprocess.run(
        command,
        cwd=checkout,
        env={
            **os.environ,
            "PYTHONPATH": code_path(checkout),
            # One thread, as sums of floats depend on the number of threads.
            "OMP_NUM_THREADS": "1",
            # Wide enough that error messages are one line.
            "COLUMNS": "400",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    metrics = {}
    for each in sorted(results.rglob("metrics.json")):
        metrics[str(each.parent.relative_to(results))] = json.loads(each.read_text())
    if not metrics:
        errors = process.stderr.strip().splitlines() or ["no metrics"]
        raise RuntimeError(f"{file.name} in {checkout}: {errors[-1]}")
    return metrics


def _write_shortened(file: Path, folder: Path) -> Path:
    """Write a shortened scenario, with the files beside the original, into a folder."""
    for other in file.parent.iterdir():
        if other.suffix != ".yaml" and other.is_file():
            (folder / other.name).write_bytes(other.read_bytes())
    tree = shorten(yamltext.values(file.read_text()))
    copy = folder / file.name
    copy.write_text(yamltext.written(tree, lines=False))
    return copy


def differences(ours: Any, theirs: Any, place: str = "") -> Iterator[str]:
    """Yield a line for each difference between two JSON values.

    >>> list(differences({"loss": 0.5, "steps": [1, 2]}, {"loss": 0.5, "steps": [1, 3]}))
    ['/steps[1]: 2 here, 3 there']
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            our_value = ours.get(key, "absent")
            their_value = theirs.get(key, "absent")
            yield from differences(our_value, their_value, f"{place}/{key}")
        return
    are_lists = isinstance(ours, list) and isinstance(theirs, list)
    if are_lists and len(ours) == len(theirs):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(*pair, f"{place}[{number}]")
        return
    # NaN, which differs from itself, is equal in both revisions.
    are_nan = ours != ours and theirs != theirs
    if ours != theirs and not are_nan:
        yield f"{place}: {str(ours)[:80]} here, {str(theirs)[:80]} there"


def main() -> None:
    """Compare the metrics of the checkout and of another revision; exit with 1 if they differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_intermixed_args()
    revision = arguments.revision
    with tempfile.TemporaryDirectory() as temporary:
        other = Path(temporary, "other")
        stored = arguments.keep or Path(temporary, "kept")
        _run_git("worktree", "add", "--quiet", "--detach", str(other), revision)
        try:
            all_equal = compare(other, stored, arguments.names, arguments.jobs)
        finally:
            _run_git("worktree", "remove", "--force", str(other))
    sys.exit(0 if all_equal else 1)


def _run_git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=HERE, check=True)


def compare(other: Path, stored: Path, names: list[str], jobs: int) -> bool:
    """Compare the metrics of two checkouts and print the differences; return whether all metrics are equal.

    ``stored`` is the folder with the metrics of the other checkout.
    """
    stored.mkdir(parents=True, exist_ok=True)
    # Scenarios that only this checkout has are left out below.
    their_files = scenario_files(other)

    def compare_scenario(name: str, file: Path) -> list[str]:
        their_metrics = stored / f"{name.replace('/', '-')}.json"
        if not their_metrics.exists():
            with tempfile.TemporaryDirectory() as folder:
                try:
                    theirs = simulate_metrics(other, their_files[name], Path(folder))
                except RuntimeError as error:
                    return [f"nothing to compare with: {error}"]
            their_metrics.write_text(json.dumps(theirs))
        with tempfile.TemporaryDirectory() as folder:
            try:
                ours = simulate_metrics(HERE, file, Path(folder))
            except RuntimeError as error:
                return [str(error)]
        return list(differences(ours, json.loads(their_metrics.read_text())))

    selected = {}
    for name, file in sorted(scenario_files(HERE).items()):
        is_selected = not names or any(part in name for part in names)
        if is_selected and name in their_files:
            selected[name] = file
    all_equal = True
    with ThreadPoolExecutor(jobs) as pool:
        comparisons = pool.map(compare_scenario, selected, selected.values())
        for name, lines in zip(selected, comparisons, strict=True):
            all_equal = all_equal and not lines
            result = f"{len(lines)} differ" if lines else "equal"
            print(f"{name}: {result}", flush=True)
            for line in lines[:10]:
                print(f"    {line}", flush=True)
    return all_equal


if __name__ == "__main__":
    main()
