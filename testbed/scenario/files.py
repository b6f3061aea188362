"""Where the files lie that a scenario needs."""

from __future__ import annotations

from pathlib import Path

from testbed.scenario.schema import Scenario

DATA_FOLDER = Path("data")
"""Where `testbed data fetch` puts a set, in a folder of its name; looked into when a scenario names no folder."""


def data_folder(scenario: Scenario) -> Path:
    """Return where the files of the scenario's data lie: its ``folder``, or where `testbed data fetch` puts them.

    Of data that are one file, and of one's own, that file or folder.
    """
    part = scenario.workload.data
    if (named := part.file or part.path) is not None:
        return scenario.source.folder / named
    return scenario.source.folder / part.folder if part.folder is not None else DATA_FOLDER / part.name


def weights_file(scenario: Scenario) -> Path | None:
    """Return the file that the model's weights are read from; None: they are drawn from the seed."""
    named = scenario.workload.model.weights
    return None if named is None else scenario.source.folder / named
