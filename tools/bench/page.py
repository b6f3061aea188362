"""Write the measurements of `tools.bench.conformance` into the documentation.

    python -m tools.bench.page userspace.json netem.json

``make bench`` runs this module with the files of its part ``conformance``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed_controller.lab.paths import ROOT

PAGE = ROOT / "docs" / "fidelity.md"
_BEGIN, _END = "<!-- figures -->\n", "<!-- /figures -->\n"
"""Lines of the page between which the table is."""


def make_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table and the commands of the runs.

    The table has a row for each measured property, and a column for each run.
    """
    heads = []
    columns = []
    # Bounds by property, in the order in which the runs measured them.
    bounds: dict[str, str] = {}
    for run in runs:
        heads.append(f"{run['backend']}, kernel {run['kernel']}, {run['date']}")
        column = {}
        for measurement in run["figures"]:
            value = f"{measurement['value']:.4g} {measurement['unit']}"
            column[measurement["name"]] = value.strip()
            bounds.setdefault(measurement["name"], _format_bounds(measurement))
        columns.append(column)
    lines = [
        f"| property | bounds | {' | '.join(heads)} |",
        "|---|---" + "|---" * len(runs) + "|",
    ]
    for name, text in bounds.items():
        # A run on a slow host lacks some properties.
        cells = [column.get(name, "") for column in columns]
        lines.append(f"| {name} | {text} | {' | '.join(cells)} |")
    lines += ["", "Made by", ""]
    files = []
    for run in runs:
        file = f"{run['backend']}.json"
        files.append(file)
        lines.append(f"    {run['command']} --json {file}")
    lines.append(f"    python -m tools.bench.page {' '.join(files)}\n")
    return "\n".join(lines)


def _format_bounds(measurement: Mapping[str, Any]) -> str:
    """Return the bounds of a measurement as text.

    >>> _format_bounds({"between": None, "at_most": True, "target": 50.0})
    'at most 50'
    """
    if measurement["between"]:
        lowest, highest = measurement["between"]
        return f"{lowest:.4g} to {highest:.4g}"
    return (
        f"at {'most' if measurement['at_most'] else 'least'} {measurement['target']:g}"
    )


def main(files: Sequence[str]) -> None:
    """Put the table of the existing files between the marks of the page."""
    existing = [path for path in map(Path, files) if path.exists()]
    runs = [json.loads(path.read_text()) for path in existing]
    if not runs:
        return
    text = PAGE.read_text()
    text_before, rest = text.split(_BEGIN)
    _former_table, text_after = rest.split(_END)
    PAGE.write_text(text_before + _BEGIN + make_table(runs) + _END + text_after)


if __name__ == "__main__":
    main(sys.argv[1:])
