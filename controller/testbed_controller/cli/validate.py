"""`testbed init` and `testbed validate`: create a study folder, and check scenario files."""

from __future__ import annotations

import json
import re
import shlex
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from testbed.common.errors import InputError
from testbed.common.formats import escape_control
from testbed.prepare import prepare_all, raise_refused
from testbed.scenario.expand import trials
from testbed.scenario.finding import SHIPPED
from testbed.scenario.loading import load
from testbed.trace.modelled import left_out
from testbed_controller.cli.options import as_json, in_results, overrides
from testbed_controller.cli.printing import dump
from testbed_controller.lab.memory import too_small

LONGEST_NAME = 31
"""Characters of a scenario's name."""


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def init(folder: Path) -> None:
    """Create FOLDER with a scenario, a network, a method and a test to start a study from.

    \b
    Example:
      testbed init my-study
      cd my-study
      testbed run my-study.yaml --runtime simulate
      pytest
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: is there already: name a new folder")
    name = _scenario_name(folder.resolve().name)
    study = {
        path.name: path.read_text() for path in sorted((SHIPPED / "study").glob("*.*"))
    }
    # In quotes: without them YAML reads null as nothing.
    study["study.yaml"] = study["study.yaml"].replace(
        "name: study\n", f"name: {json.dumps(name)}\n"
    )
    study["study.yaml"] = study["study.yaml"].replace("study.yaml", f"{name}.yaml")
    study["test_study.py"] = study["test_study.py"].replace(
        "study.yaml", f"{name}.yaml"
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in study.items():
            (folder / file.replace("study.yaml", f"{name}.yaml")).write_text(text)
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be created: {error.strerror or error}"
        ) from None
    click.echo(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    click.echo(
        f"next: cd {shlex.quote(str(folder))} && testbed run {name}.yaml --runtime simulate"
    )


def _scenario_name(folder: str) -> str:
    """Derive a valid scenario name from a folder name, such as ``studie-a`` from ``Studie Ä``."""
    letters = (
        unicodedata.normalize("NFKD", folder).encode("ascii", "ignore").decode().lower()
    )
    name = re.sub("[^a-z0-9]+", "-", letters).strip("-")[:LONGEST_NAME].rstrip("-")
    if name[:1].isalpha():
        return name
    return f"study-{name}"[:LONGEST_NAME].rstrip("-")


@click.command()
@click.argument("scenarios", nargs=-1, required=True, metavar="SCENARIO...")
@overrides
@as_json
def validate(
    scenarios: tuple[str, ...], overrides: tuple[str, ...], as_json: bool
) -> None:
    """Check scenario files: keys, units, devices, links, the plan, faults and expectations.

    Everything that `testbed run` would refuse is refused here, before any container exists: one line for each
    problem with file, line, key, what is wrong and what would be right. Exits with 2 if any file has one. Python files
    that a scenario names are executed, but not those in the results of a run.

    \b
    Examples:
      testbed validate quickstart
      testbed validate scenarios/*.yaml scenarios/smoke/*.yaml
    """
    results = [_validate_scenario(name, overrides) for name in scenarios]
    if as_json:
        dump(results)
    else:
        for result in results:
            if result["ok"]:
                click.echo(f"ok {result['file']}: {result['summary']}")
                for text in result["advice"]:
                    click.echo(f"   {text}")
            for error in result["errors"]:
                click.echo(escape_control(error), err=True)
    if not all(result["ok"] for result in results):
        sys.exit(InputError.exit_code)


def _validate_scenario(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    file = name
    try:
        scenario = load(name, overrides)
        file = scenario.source.file
        runs = trials(scenario)
        prepared, refused = ({}, []) if in_results(scenario) else prepare_all(runs)
        raise_refused(refused)
        advice = [
            text
            for each in prepared.values()
            for text in each.method.advice(each.problem, each.plan)
        ]
        for done in prepared.values():
            if text := too_small(
                done.experiment.devices, torch=done.method.needs_torch
            ):
                advice.append(text)
        for each in runs:
            advice += [
                f"not in the model of the virtual clock: {text}"
                for text in left_out(each.experiment)
            ]
    except InputError as error:
        return {"file": file, "ok": False, "errors": str(error).split("\n")}
    first = runs[0].experiment
    devices, links = len(first.devices), len(first.links)
    counted = [
        (devices, "device"),
        (links, "directed link"),
        (len(scenario.faults), "fault"),
        (len(runs), "run"),
    ]
    summary = ", ".join(
        f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counted
    )
    if in_results(scenario):
        summary += "; its Python files, which lie among results, were not executed: no plan was checked"
    return {
        "file": file,
        "ok": True,
        "runs": len(runs),
        "summary": summary,
        "errors": [],
        "advice": [*dict.fromkeys(advice)],
    }
