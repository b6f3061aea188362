"""Write the measurements of `tools.bench.conformance` into the documentation.

python -m tools.bench.page userspace.json netem.json

``make bench`` runs this with the files of its part ``conformance``.
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


def make_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table with a row for each figure and a column for each run, and the commands of the runs."""
    heads = [f"{run['backend']}, kernel {run['kernel']}, {run['date']}" for run in runs]
    lines = [
        f"| property | bounds | {' | '.join(heads)} |",
        "|---|---" + "|---" * len(runs) + "|",
    ]
    columns = []
    bounds: dict[str, str] = {}
    for run in runs:
        column = {}
        for figure in run["figures"]:
            value = f"{figure['value']:.4g} {figure['unit']}"
            column[figure["name"]] = value.strip()
            bounds.setdefault(figure["name"], _format_bounds(figure))
        columns.append(column)
    for name, text in bounds.items():
        cells = [column.get(name, "") for column in columns]
        lines.append(f"| {name} | {text} | {' | '.join(cells)} |")
    lines += ["", "Made by", ""]
    for run in runs:
        lines.append(f"    {run['command']} --json {run['backend']}.json")
    files = " ".join(f"{run['backend']}.json" for run in runs)
    lines.append(f"    python -m tools.bench.page {files}\n")
    return "\n".join(lines)


def _format_bounds(figure: Mapping[str, Any]) -> str:
    """Return the bounds of a measurement as text.

    >>> _format_bounds({"between": None, "at_most": True, "target": 50.0})
    'at most 50'
    """
    if figure["between"]:
        lowest, highest = figure["between"]
        return f"{lowest:.4g} to {highest:.4g}"
    return f"at {'most' if figure['at_most'] else 'least'} {figure['target']:g}"


def main(files: Sequence[str]) -> None:
    """Put the table of the existing files between the marks of the page."""
    present = [path for path in map(Path, files) if path.exists()]
    runs = [json.loads(path.read_text()) for path in present]
    if not runs:
        return
    text = PAGE.read_text()
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    PAGE.write_text(before + _BEGIN + make_table(runs) + _END + after)


if __name__ == "__main__":
    main(sys.argv[1:])
