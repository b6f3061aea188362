"""`testbed init` and `testbed validate`: create a study folder, and check scenario files."""

from __future__ import annotations

import json
import re
import shlex
import sys
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from testbed.common.errors import InputError, TestbedError
from testbed.common.formats import escape_control
from testbed.common.usercode import describe_error
from testbed.prepare import Prepared, prepare_all, raise_refused
from testbed.scenario.expand import trials
from testbed.scenario.finding import SHIPPED
from testbed.scenario.loading import load
from testbed.scenario.schema import Trial
from testbed.trace.modelled import unmodelled_effects
from testbed_controller.cli.options import (
    json_option,
    overrides_option,
    runs_code_from_results,
)
from testbed_controller.cli.printing import dump
from testbed_controller.lab.memory import describe_small_memory

LONGEST_NAME = 31
"""Maximum number of characters in a scenario's name; `testbed.scenario.devices` refuses longer names."""


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
    try:
        is_taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{folder}: cannot be read: {reason}") from None
    if is_taken:
        raise InputError(f"{folder}: already exists: name a new folder")
    name = _scenario_name(folder.resolve().name)
    scenario_file = f"{name}.yaml"
    texts = {}
    for template in sorted((SHIPPED / "study").glob("*.*")):
        texts[template.name] = template.read_text()
    # The templates use the name "study" for the scenario and its file.
    scenario = texts.pop("study.yaml").replace("study.yaml", scenario_file)
    # In quotes, since YAML would read a name such as null as no value.
    texts[scenario_file] = scenario.replace(
        "name: study\n", f"name: {json.dumps(name)}\n"
    )
    test = texts["test_study.py"]
    texts["test_study.py"] = test.replace("study.yaml", scenario_file)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (folder / file).write_text(text)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{folder}: cannot be created: {reason}") from None
    click.echo(f"written to {folder}: {', '.join(sorted(texts))}")
    run_command = f"testbed run {scenario_file} --runtime simulate"
    click.echo(f"next: cd {shlex.quote(str(folder))} && {run_command}")


def _scenario_name(folder: str) -> str:
    """Derive a valid scenario name from a folder name, for example ``studie-a`` from ``Studie Ä``."""
    # The decomposed form separates accents from their letters, so that only the accents are lost.
    decomposed = unicodedata.normalize("NFKD", folder)
    letters = decomposed.encode("ascii", "ignore").decode().lower()
    words = re.sub("[^a-z0-9]+", "-", letters).strip("-")
    name = words[:LONGEST_NAME].rstrip("-")
    if name[:1].isalpha():
        return name
    return f"study-{name}"[:LONGEST_NAME].rstrip("-")


@click.command()
@click.argument("scenarios", nargs=-1, required=True, metavar="SCENARIO...")
@overrides_option
@json_option
def validate(
    scenarios: tuple[str, ...], overrides: tuple[str, ...], as_json: bool
) -> None:
    """Check scenario files: keys, units, devices, links, the plan, faults and expectations.

    Reports everything that `testbed run` would reject before it creates a container: one line for each problem, with
    file, line, key, the mistake and its remedy. The exit status is 2 if any file has a problem. Python files that a
    scenario names are executed, except those in the results of a run.

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
            _print_result(result)
    if not all(result["ok"] for result in results):
        sys.exit(InputError.exit_code)


def _print_result(result: Mapping[str, Any]) -> None:
    if result["ok"]:
        click.echo(f"ok {result['file']}: {result['summary']}")
        for text in result["advice"]:
            click.echo(f"   {text}")
    for error in result["errors"]:
        click.echo(escape_control(error), err=True)


def _validate_scenario(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    file = name
    try:
        scenario = load(name, overrides)
        file = scenario.source.file
        runs = trials(scenario)
        prepared_by_run: dict[int, Prepared] = {}
        if not runs_code_from_results(scenario):
            prepared_by_run, refused = prepare_all(runs)
            raise_refused(refused)
        # Runs of a sweep share most of their advice: each text is shown once, in order.
        advice = [*dict.fromkeys(_advice_for(prepared_by_run.values(), runs))]
    except Exception as error:
        # An error in one file, also in a user's method, must not end the check of the other files.
        text = str(error) if isinstance(error, TestbedError) else describe_error(error)
        if text is None:
            raise
        return {
            "file": file,
            "ok": False,
            "runs": 0,
            "summary": "",
            "errors": text.split("\n"),
            "advice": [],
        }
    # The runs of a sweep may have different numbers of devices and links.
    device_counts = []
    link_counts = []
    for each in runs:
        device_counts.append(len(each.experiment.devices))
        link_counts.append(len(each.experiment.links))
    counts = [
        _count_text(device_counts, "device"),
        _count_text(link_counts, "directed link"),
        _count_text([len(scenario.faults)], "fault"),
        _count_text([len(runs)], "run"),
    ]
    summary = ", ".join(counts)
    if runs_code_from_results(scenario):
        summary += "; its Python files are in a results folder and were not executed: no plan was checked"
    return {
        "file": file,
        "ok": True,
        "runs": len(runs),
        "summary": summary,
        "errors": [],
        "advice": advice,
    }


def _advice_for(prepared: Collection[Prepared], runs: Sequence[Trial]) -> Iterator[str]:
    """Yield the advice of each method, devices with little memory, and effects the simulator does not model."""
    for each in prepared:
        yield from each.method.advice(each.problem, each.plan)
    for each in prepared:
        text = describe_small_memory(
            each.experiment.devices, torch=each.method.needs_torch
        )
        if text:
            yield text
    for run in runs:
        for text in unmodelled_effects(run.experiment):
            yield f"not in the model of the virtual clock: {text}"


def _count_text(counts: Sequence[int], noun: str) -> str:
    """Return the count with a noun; a range if the runs of a sweep differ."""
    lowest, highest = min(counts), max(counts)
    number = str(highest) if lowest == highest else f"{lowest} to {highest}"
    return f"{number} {noun}{'' if highest == 1 else 's'}"
