"""Writes what `tools.bench.conformance` measured into the documentation.

python -m tools.bench.page userspace.json netem.json

``make bench`` does that with what its part ``conformance`` found.
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


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with one row per figure and one column per run, in Markdown."""
    heads = [f"{run['backend']}, kernel {run['kernel']}, {run['date']}" for run in runs]
    lines = [
        f"| property | bounds | {' | '.join(heads)} |",
        "|---|---" + "|---" * len(runs) + "|",
    ]
    found = [{figure["name"]: figure for figure in run["figures"]} for run in runs]
    for name in dict.fromkeys(name for each in found for name in each):
        figures = [each.get(name) for each in found]
        first = next(figure for figure in figures if figure)
        cells = [
            "" if figure is None else f"{figure['value']:.4g} {figure['unit']}".strip()
            for figure in figures
        ]
        lines.append(f"| {name} | {_bounds(first)} | {' | '.join(cells)} |")
    commands = "".join(
        f"    {run['command']} --json {run['backend']}.json\n" for run in runs
    )
    files = " ".join(f"{run['backend']}.json" for run in runs)
    return (
        "\n".join(lines)
        + f"\n\nMade by\n\n{commands}    python -m tools.bench.page {files}\n"
    )


def _bounds(figure: Mapping[str, Any]) -> str:
    if figure["between"]:
        lowest, highest = figure["between"]
        return f"{lowest:.4g} to {highest:.4g}"
    return f"at {'most' if figure['at_most'] else 'least'} {figure['target']:g}"


def main(files: Sequence[str]) -> None:
    """Put the table of these files, those that are there, between the page's marks."""
    runs = [json.loads(Path(file).read_text()) for file in files if Path(file).exists()]
    if not runs:
        return
    text = PAGE.read_text()
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    PAGE.write_text(before + _BEGIN + table(runs) + _END + after)


if __name__ == "__main__":
    main(sys.argv[1:])
