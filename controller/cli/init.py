"""`testbed init`: a folder to begin a study of one's own with."""

from __future__ import annotations

import json
from pathlib import Path

import click

from testbed.common.errors import InputError


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
    from testbed.scenario.loading import SHIPPED, load

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
