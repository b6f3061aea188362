"""Lay out the documentation as a site: these pages, and one for each method and paper, made of what the code declares.

``python docs/website.py FOLDER`` writes the sources and mkdocs.yml into FOLDER, new or made by it; `make site` builds
them with mkdocs-material.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.common import yamltext
from testbed.method import Method
from testbed.methods import METHODS
from testbed.scenario.finding import find, scenarios_in
from testbed.scenario.loading import load
from testbed.scenario.schema import Scenario
from testbed.scenario.sweeps import sweep_points
from testbed_controller.cli.main import COMMANDS
from testbed_controller.cli.printing import options
from testbed_controller.report.charts import COLOURS

ROOT = Path(__file__).parents[1]
PAPERS = {
    "stahl": "Stahl et al.: fully distributed inference",
    "ftpipehd": "FTPipeHD",
    "pipelearn": "PipeLearn",
    "edgepipe": "EdgePipe",
    "versatilefl": "VersatileFL",
}
"""Folder below `papers` -> title of its page."""
PAPER_OF = {
    "distributed": "stahl",
    "ftpipehd": "ftpipehd",
    "pipelearn": "pipelearn",
    "edgepipe": "edgepipe",
    "versatile": "versatilefl",
}
"""By method."""
SETTINGS: dict[str, Any] = yamltext.values((ROOT / "docs/mkdocs.yml").read_text())
EXTRA = Path("docs/papers.md")
"""The headlines of all papers."""


@dataclass(frozen=True)
class Shipped:
    """A scenario of the testbed."""

    name: str
    """As `testbed run` takes it."""
    scenario: Scenario

    @property
    def file(self) -> str:
        """Its place in the repository."""
        return find(self.name).resolve().relative_to(ROOT).as_posix()

    @property
    def runs(self) -> int:
        """Points of its sweep times repetitions."""
        return len(list(sweep_points(self.scenario))) * self.scenario.repetitions


Navigation = list[dict[str, Any]]
"""Titles with their pages, or with a list of such."""


def grouped() -> Navigation:
    """Return the pages that are taken as they are, in the groups of the settings; others end the last group."""
    groups: Navigation = [dict(group) for group in SETTINGS["nav"]]
    known = set(places(groups))
    last = next(iter(groups[-1].values()))
    for file in sorted((ROOT / "docs").glob("*.md")):
        place = f"docs/{file.name}"
        if place not in known and place not in ("docs/README.md", str(EXTRA)):
            heading = file.read_text().partition("\n")[0].removeprefix("# ")
            last.append({heading: place})
    return groups


def places(navigation: Navigation) -> Iterator[str]:
    """Yield the pages of a navigation."""
    for group in navigation:
        for content in group.values():
            if isinstance(content, str):
                yield content
            else:
                yield from places(content)


def shipped() -> list[Shipped]:
    """Return every scenario of the testbed."""
    return [Shipped(name, load(file)) for name, file in scenarios_in().items()]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table, or nothing without rows."""
    if not rows:
        return ""
    cells = [
        [
            str(cell).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
            for cell in row
        ]
        for row in rows
    ]
    return (
        "\n".join(
            "| " + " | ".join(row) + " |"
            for row in [header, ["---"] * len(header), *cells]
        )
        + "\n\n"
    )


def method_page(method: Method, scenarios: Sequence[Shipped]) -> str:
    """Return the page of a method: what it is, its options, what it reports of its runs, scenarios to try."""
    text = f"# {method.name}\n\n{method.summary[:1].upper()}{method.summary[1:]}. Tasks: {', '.join(method.tasks)}.\n\n"
    text += inspect.cleandoc(type(method).__doc__ or "") + "\n\n"
    if method.name in PAPER_OF:
        text += f"[What its paper prints, and ours](../papers/{PAPER_OF[method.name]}/README.md).\n\n"
    rows = [
        (f"`{each['name']}`", _default(each), each["description"])
        for each in options(method.Options)
    ]
    text += "## Options\n\nKeys beside `name` in `workload.method`.\n\n" if rows else ""
    text += table(("option", "default", "meaning"), rows)
    stand = [
        (f"`baseline: {name}`", f"`{json.dumps(given)}`")
        for name, given in method.Options.baselines.items()
    ]
    text += table(("baseline", "stands for"), stand)
    figures = [
        (f"`{each.name}`", each.kind, each.meaning) for each in method.declared.metrics
    ]
    text += (
        "## Metrics\n\nIn addition to [the metrics of every method](../docs/scenario/metrics.md).\n\n"
        if figures
        else ""
    )
    text += table(("metric", "unit", "meaning"), figures)
    events = [
        (f"`{each.name}`", each.meaning, ", ".join(each.fields))
        for each in method.declared.events
    ]
    text += "## Events\n\n" if events else ""
    text += table(("event", "meaning", "fields"), events)
    of_it = []
    for each in scenarios:
        workload = each.scenario.workload
        if workload.method.name == method.name and workload.task in method.tasks:
            of_it.append(each)
    return text + ("## Scenarios\n\n" + _scenario_table(of_it) if of_it else "")


def _default(option: Mapping[str, Any]) -> str:
    default = (
        "required"
        if option["required"]
        else f"`{json.dumps(option['default'])}`".replace("`null`", "")
    )
    choices = ", ".join(f"`{each}`" for each in option["choices"])
    return f"{default} (one of {choices})" if choices else default


def _scenario_table(scenarios: Sequence[Shipped]) -> str:
    rows = [
        (f"[{each.name}](../{each.file})", each.scenario.description, each.runs)
        for each in scenarios
    ]
    return table(("scenario", "what it is", "runs"), rows)


def paper_pages() -> Iterator[tuple[str, str]]:
    """Yield the page with the headlines of all papers, and the page of each paper."""
    yield str(EXTRA), (ROOT / EXTRA).read_text()
    for family in PAPERS:
        page = f"papers/{family}/README.md"
        yield page, (ROOT / page).read_text()


def pages(scenarios: Sequence[Shipped]) -> dict[str, str]:
    """Return the text of every page by its place, links as they are in the repository."""
    found = {place: (ROOT / place).read_text() for place in places(grouped())}
    found |= {
        f"docs/commands/{name}.md": (ROOT / f"docs/commands/{name}.md").read_text()
        for name in COMMANDS
    }
    found |= {
        f"methods/{name}.md": method_page(method, scenarios)
        for name, method in METHODS.items()
    }
    return found | dict(paper_pages())


def linked(place: str, text: str, known: Mapping[str, str], site: Path) -> str:
    """Return a page whose links lead somewhere: files that are no pages are copied, folders are named only.

    The marks of generated parts go: a table that follows one at once would be none to mkdocs.
    """

    folder = Path(place).parent

    def lead(match: re.Match[str]) -> str:
        words, target, anchor = match.groups(default="")
        path = os.path.normpath(folder / target)
        if path == "docs/README.md":
            path = "README.md"
        if path not in known:
            if not (ROOT / path).is_file():
                return words
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, site / path)
        return f"[{words}]({os.path.relpath(path, folder)}{anchor})"

    return re.sub(
        r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)",
        lead,
        re.sub(r"<!-- /?\w+ -->", "", text),
    )


def navigation() -> Navigation:
    """Return mkdocs' navigation: titles with their pages, or with a list of such."""
    families = [
        {title: f"papers/{family}/README.md"} for family, title in PAPERS.items()
    ]
    return [
        *grouped(),
        {"Methods": [{name: f"methods/{name}.md"} for name in METHODS]},
        {"Papers": [{"Figures, theirs and ours": str(EXTRA)}, *families]},
        {"Commands": [{name: f"docs/commands/{name}.md"} for name in COMMANDS]},
    ]


def main(folder: Path) -> None:
    """Write everything that mkdocs needs."""
    site = folder / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    found = pages(shipped())
    for place, text in found.items():
        file = site / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(linked(place, text, found, site))
    colours = " ".join(f"--{name}: {colour};" for name, colour in COLOURS.items())
    (site / "tables.css").write_text(
        f":root {{ {colours} }}\n" + (ROOT / "docs/tables.css").read_text()
    )
    # JSON is YAML.
    (folder / "mkdocs.yml").write_text(
        json.dumps({**SETTINGS, "nav": navigation()}, indent=2)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
