"""`testbed init`, `validate` and `schema`: what a scenario file may say, and a folder to begin a study with."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from controller.cli.options import as_json, in_results, overrides
from controller.cli.printing import dump
from testbed.common.errors import InputError
from testbed.common.formats import visible
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import SHIPPED, load, published_schema


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
    name, made = folder.resolve().name, not folder.exists()
    study = {path.name: path.read_text() for path in sorted((SHIPPED / "study").glob("*.*"))}
    # In quotes: without them YAML reads null as nothing.
    study["study.yaml"] = study["study.yaml"].replace("name: study\n", f"name: {json.dumps(name)}\n")
    study["study.yaml"] = study["study.yaml"].replace("study.yaml", f"{name}.yaml")
    study["test_study.py"] = study["test_study.py"].replace("study.yaml", f"{name}.yaml")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in study.items():
            (folder / file.replace("study.yaml", f"{name}.yaml")).write_text(text)
        load(folder / f"{name}.yaml")
    except InputError:
        for written in list(folder.iterdir()):
            written.unlink()
        if made:
            folder.rmdir()
        text = f"{folder}: '{name}' is no name of a scenario: use lower-case letters, digits and dashes, a letter first"
        raise InputError(f"{text}, 31 of them at most") from None
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror or error}") from None
    click.echo(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    click.echo(f"next: cd {folder} && testbed run {name}.yaml --runtime simulate")


@click.command()
@click.argument("scenarios", nargs=-1, required=True, metavar="SCENARIO...")
@overrides
@as_json
def validate(scenarios: tuple[str, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """Check scenario files: keys, units, devices, links, the plan, faults and expectations.

    Everything that `testbed run` would refuse is refused here, before any container exists: one line for each
    problem with file, line, key, what is wrong and what would be right. Exits with 2 if any file has one. Python files
    that a scenario names are executed, but not those in the results of a run.

    \b
    Examples:
      testbed validate quickstart
      testbed validate scenarios/*.yaml scenarios/smoke/*.yaml
    """
    results = [_validate(name, overrides) for name in scenarios]
    if as_json:
        dump(results)
    else:
        for result in results:
            if result["ok"]:
                click.echo(f"ok {result['file']}: {result['summary']}")
                for text in result["advice"]:
                    click.echo(f"   {text}")
            for error in result["errors"]:
                click.echo(visible(error), err=True)
    if not all(result["ok"] for result in results):
        sys.exit(InputError.exit_code)


def _validate(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    file = name
    try:
        scenario = load(name, overrides)
        file = scenario.source.file
        runs = trials(scenario)
        prepared = [prepare(each) for each in (runs if not in_results(scenario) else ())]
        advice = [text for each in prepared for text in each.method.advice(each.problem, each.plan)]
    except InputError as error:
        return {"file": file, "ok": False, "errors": str(error).split("\n")}
    first = runs[0].experiment
    devices, links = len(first.devices), len(first.links)
    counted = [(devices, "device"), (links, "directed link"), (len(scenario.faults), "fault"), (len(runs), "run")]
    summary = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counted)
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


@click.command()
def schema() -> None:
    """Print the JSON schema of scenario files.

    Editors with a YAML language server complete and check scenarios with it. The options of models and methods
    are not part of it: `testbed models` and `testbed methods` list them, `testbed validate` checks them.

    \b
    Example, for the first line of a scenario file:
      testbed schema > scenario.schema.json
      # yaml-language-server: $schema=scenario.schema.json
    """
    dump(published_schema())
