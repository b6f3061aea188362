"""Hold the figures of every scenario at this revision against those of another, to the bit.

    python tools/same_figures.py REVISION [--keep FOLDER] [NAME ...]

Each scenario whose file name contains one of the names (all, without names) is simulated in both checkouts: shortened
where it is one of a paper's, with two points of a sweep and one repetition. Prints what differs, and exits with 1 where
anything does. With ``--keep`` the other revision's figures are written to a folder, and read from it the next time.
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
HERE = Path(__file__).resolve().parents[1]
LONGEST = {"steps": 24, "epochs": 1, "requests": 3}
"""At most this of a paper's workload."""
LONGEST_METHOD = {"time": "60s", "test_runs": 4}


def shortened(scenario: dict[str, Any]) -> dict[str, Any]:
    """Return a paper's scenario cut to seconds: little work, the first and the last point, nothing to expect."""
    work = scenario["workload"]
    for key, most in LONGEST.items():
        if isinstance(work.get(key), int):
            work[key] = min(work[key], most)
    for fault in scenario.get("faults", ()):
        moment = fault.get("when")
        # A fault of a batch that the shortened run never reaches would be refused.
        if isinstance(moment, dict) and "steps" in work and "batch" in moment:
            moment["batch"] = min(moment["batch"], work["steps"] // 2)
    work.get("method", {}).update(
        {
            key: most
            for key, most in LONGEST_METHOD.items()
            if key in work.get("method", {})
        }
    )
    for key in ("points", "sweep"):
        if isinstance(scenario.get(key), list):
            scenario[key] = scenario[key][:: max(len(scenario[key]) - 1, 1)]
    if isinstance(scenario.get("sweep"), dict):
        scenario["sweep"] = {
            key: values[:1] if isinstance(values, list) else values
            for key, values in scenario["sweep"].items()
        }
    for key in ("expect", "paper"):  # older revisions have publications in the scenario
        scenario.pop(key, None)
    return scenario | {"repetitions": 1}


def code_path(checkout: Path) -> str:
    """Return the folders with the packages of a checkout, which precede the installed ones."""
    folders = [
        checkout,
        checkout / "agent",
        checkout / "controller",
        *checkout.glob("papers/*"),
    ]
    return os.pathsep.join(map(str, folders))


def scenarios(checkout: Path) -> dict[str, Path]:
    """Return the files of a checkout's scenarios by the names that `testbed run` takes."""
    found = {}
    for file in checkout.glob("scenarios/**/*.yaml"):
        found[file.relative_to(checkout / "scenarios").with_suffix("").as_posix()] = (
            file
        )
    for file in checkout.glob("papers/*/scenarios/*.yaml"):
        found[f"papers/{file.stem}"] = file
    return found


def figures(checkout: Path, file: Path, folder: Path) -> dict[str, Any]:
    """Return the figures of each run of a scenario, simulated by the code in ``checkout``; raises RuntimeError."""
    given, short = file, folder / file.name
    if "papers" in file.relative_to(checkout).parts:
        for other in file.parent.iterdir():
            if other.suffix != ".yaml" and other.is_file():
                (folder / other.name).write_bytes(other.read_bytes())
        short.write_text(
            yamltext.written(shortened(yamltext.values(file.read_text())), lines=False)
        )
        given = short
    results = folder / "results"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            COMMAND,
            "run",
            str(given),
            "--runtime",
            "simulate",
            "--out",
            str(results),
        ],
        cwd=checkout,
        env={
            **os.environ,
            "PYTHONPATH": code_path(checkout),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "400",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    found = {
        str(each.parent.relative_to(results)): json.loads(each.read_text())
        for each in sorted(results.rglob("metrics.json"))
    }
    if not found:
        raise RuntimeError(
            f"{file.name} in {checkout}: {(done.stderr.strip().splitlines() or ['no figures'])[-1]}"
        )
    return found


def differences(ours: Any, theirs: Any, place: str = "") -> Iterator[str]:
    """Yield each place where two figures differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            yield from differences(
                ours.get(key, "absent"), theirs.get(key, "absent"), f"{place}/{key}"
            )
    elif (
        isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs)
    ):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(*pair, f"{place}[{number}]")
    elif ours != theirs and not (
        ours != ours and theirs != theirs
    ):  # not a number differs from itself
        yield f"{place}: {str(ours)[:80]} here, {str(theirs)[:80]} there"


def main() -> None:
    """Compare, and say what differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as temporary:
        other = Path(temporary, "other")
        subprocess.run(
            [
                "git",
                "worktree",
                "add",
                "--quiet",
                "--detach",
                str(other),
                given.revision,
            ],
            cwd=HERE,
            check=True,
        )
        try:
            sys.exit(
                compare(
                    other,
                    given.keep or Path(temporary, "kept"),
                    given.names,
                    given.jobs,
                )
            )
        finally:
            subprocess.run(
                ["git", "worktree", "remove", "--force", str(other)],
                cwd=HERE,
                check=True,
            )


def compare(other: Path, kept: Path, names: list[str], jobs: int) -> int:
    """Compare this checkout with another; return how many scenarios differ, at most 1."""
    kept.mkdir(parents=True, exist_ok=True)

    theirs = scenarios(other)

    def one(name: str, file: Path) -> list[str]:
        there = kept / f"{name.replace('/', '-')}.json"
        if not there.exists():
            with tempfile.TemporaryDirectory() as folder:
                try:
                    there.write_text(
                        json.dumps(figures(other, theirs[name], Path(folder)))
                    )
                except RuntimeError as error:
                    return [f"nothing to compare with: {error}"]
        try:
            with tempfile.TemporaryDirectory() as folder:
                return list(
                    differences(
                        figures(HERE, file, Path(folder)), json.loads(there.read_text())
                    )
                )
        except RuntimeError as error:
            return [str(error)]

    chosen = {}
    for name, file in sorted(scenarios(HERE).items()):
        if name in theirs and (not names or any(each in name for each in names)):
            chosen[name] = file
    differing = 0
    with ThreadPoolExecutor(jobs) as pool:
        for name, found in zip(
            chosen, pool.map(one, chosen, chosen.values()), strict=True
        ):
            differing += bool(found)
            print(
                f"{name}: {'equal' if not found else f'{len(found)} differ'}",
                flush=True,
            )
            for line in found[:10]:
                print(f"    {line}", flush=True)
    return int(differing > 0)


if __name__ == "__main__":
    main()
