"""Lay out the documentation as a site: these pages, and one for each method and paper, made of what the code declares.

``python docs/website.py FOLDER`` writes the sources and mkdocs.yml into FOLDER, new or made by it; `make site` builds
them with mkdocs-material.
"""

from __future__ import annotations

import html
import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from testbed.common import formats, yamltext
from testbed.method import Method
from testbed.methods import METHODS
from testbed.scenario.finding import find, named
from testbed.scenario.loading import load
from testbed.scenario.schema import PaperPart, Scenario
from testbed.scenario.sweeps import swept
from testbed_controller.cli.main import COMMANDS
from testbed_controller.cli.printing import options
from testbed_controller.report import paper
from testbed_controller.report.charts import COLOURS
from testbed_controller.report.drawing import inline
from testbed_controller.results import papers

ROOT = Path(__file__).parents[1]
PAPERS = {
    "stahl": "Stahl et al.: fully distributed inference",
    "ftpipehd": "FTPipeHD",
    "pipelearn": "PipeLearn",
    "edgepipe": "EdgePipe",
    "versatilefl": "VersatileFL",
}
"""The papers that are reproduced, by the beginning of their scenarios' names."""
NEVER_RUN: dict[str, Any] = {"rows": []}
"""What is kept of a scenario that was not run."""
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
"""Divided into the papers' pages."""


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
        return len(list(swept(self.scenario))) * self.scenario.repetitions


def guide() -> dict[str, str]:
    """Return the pages that are taken as they are, by title: those of the settings, then others by their heading."""
    listed = {title: place for each in SETTINGS["nav"] for title, place in each.items()}
    others = sorted({f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")} - {*listed.values(), str(EXTRA)})
    first = {(ROOT / place).read_text().partition("\n")[0].removeprefix("# "): place for place in others}
    first.pop("Documentation", None)  # the list of them, which the site's navigation is
    return {**listed, **first}


def shipped() -> list[Shipped]:
    """Return every scenario of the testbed."""
    return [Shipped(name, load(file)) for name, file in named().items()]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table, or nothing without rows."""
    if not rows:
        return ""
    cells = [[str(cell).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *cells]) + "\n\n"


def method_page(method: Method, scenarios: Sequence[Shipped]) -> str:
    """Return the page of a method: what it is, its options, what it reports of its runs, scenarios to try."""
    text = f"# {method.name}\n\n{method.summary[:1].upper()}{method.summary[1:]}. Tasks: {', '.join(method.tasks)}.\n\n"
    text += inspect.cleandoc(type(method).__doc__ or "") + "\n\n"
    if method.name in PAPER_OF:
        text += f"[What its paper prints, and ours](../docs/papers/{PAPER_OF[method.name]}.md).\n\n"
    rows = [(f"`{each['name']}`", _default(each), each["description"]) for each in options(method.Options)]
    text += "## Options\n\nKeys beside `name` in `workload.method`.\n\n" if rows else ""
    text += table(("option", "default", "meaning"), rows)
    stand = [(f"`baseline: {name}`", f"`{json.dumps(given)}`") for name, given in method.Options.baselines.items()]
    text += table(("baseline", "stands for"), stand)
    figures = [(f"`{each.name}`", each.kind, each.meaning) for each in method.declared.figures]
    text += "## Figures\n\nBeside [those of every method](../docs/scenario.md#expectations).\n\n" if figures else ""
    text += table(("figure", "in", "what it is"), figures)
    events = [(f"`{each.name}`", each.meaning, ", ".join(each.fields)) for each in method.declared.events]
    text += "## Events\n\n" if events else ""
    text += table(("event", "what it says", "fields"), events)
    of_it = [each for each in scenarios if each.scenario.workload.method.name == method.name]
    return text + ("## Scenarios\n\n" + _scenario_table(of_it) if of_it else "")


def _default(option: Mapping[str, Any]) -> str:
    default = "required" if option["required"] else f"`{json.dumps(option['default'])}`".replace("`null`", "")
    choices = ", ".join(f"`{each}`" for each in option["choices"])
    return f"{default} (one of {choices})" if choices else default


def _scenario_table(scenarios: Sequence[Shipped]) -> str:
    rows = [(f"[{each.name}](../{each.file})", each.scenario.description, each.runs) for each in scenarios]
    return table(("scenario", "what it is", "runs"), rows)


def paper_pages(scenarios: Sequence[Shipped]) -> Iterator[tuple[str, str]]:
    """Yield place and text of each paper's page, and of the one before them."""
    head, *sections = re.split(r"(?m)^(?=## )", (ROOT / EXTRA).read_text())
    pages = {family: [part for part in sections if re.search(f"papers(/|: ){family}", part)] for family in PAPERS}
    if sorted(part for parts in pages.values() for part in parts) != sorted(sections):
        raise ValueError(f"{EXTRA}: each section has to name scenarios of one paper")
    listed = "".join(f"- [{title}]({family}.md)\n" for family, title in PAPERS.items())
    yield "docs/papers.md", head + "\n" + listed.replace("](", "](papers/")
    for family, title in PAPERS.items():
        own = [each for each in scenarios if each.name.startswith(f"papers/{family}")]
        methods = ", ".join(f"[{name}](../../methods/{name}.md)" for name, of in PAPER_OF.items() if of == family)
        text = f"# {title}\n\nMethod: {methods}. How the tables came about: [theirs and ours](../papers.md).\n\n"
        text += "".join(pages[family]).replace("](../", "](../../")
        yield f"docs/papers/{family}.md", text + "".join(_printed(each) for each in own)


def _printed(each: Shipped) -> str:
    """Return what a scenario holds against its paper: which figures, what they are there, what is expected here."""
    part = each.scenario.paper
    text = f"## Scenario {each.name.partition('/')[2]}\n\n{each.scenario.description}. "
    text += f"[The file](../../{each.file}), {each.runs} runs:\n\n    testbed run {each.name} --runtime simulate\n\n"
    if part is None:
        return text
    rows = [(row.name, "" if row.value is None else row.value, row.expect or "", row.note) for row in part.rows]
    rows = [row for row in rows if any(row[1:])]  # the others are drawn, and the paper prints no figure
    text += f"{part.source}:\n\n" + table(("", "paper", "expected here", "note"), rows)
    return text + bars(each.scenario.name) + plots(each.scenario.name, part)


@cache
def kept() -> dict[str, Any]:
    """Return what came of the papers' scenarios, by their names."""
    return papers.shown(ROOT / "docs")


def bars(name: str) -> str:
    """Return each figure of a paper's scenario that was kept as two bars, the paper's above ours; text without any."""
    rows = [row for row in papers.rows_of(kept().get(name, NEVER_RUN)) if row.outcome]
    if not rows:
        return ""
    lines = [f'<div><svg viewBox="0 0 800 {34 * len(rows)}" font-size="12" fill="currentColor">']
    for place, row in enumerate(rows):
        both = [value or 0.0 for value in (row.paper, row.ours)]
        longest = max(map(abs, both)) or 1.0
        lines.append(f'<text x="330" y="{34 * place + 18}" text-anchor="end">{html.escape(row.name)}</text>')
        for number, value in enumerate(both):
            top, width = 34 * place + 2 + 13 * number, 380 * abs(value) / longest
            lines.append(f'<rect x="340" y="{top}" width="{width:.0f}" height="11" opacity="{0.3 + 0.4 * number}"/>')
            shown = html.escape(formats.of_kind(row.kind, value))
            lines.append(f'<text x="{344 + width:.0f}" y="{top + 10}">{shown}</text>')
    return "The paper's (light) and ours (dark):\n\n" + "\n".join([*lines, "</svg></div>"]) + "\n\n"


def plots(name: str, part: PaperPart) -> str:
    """Return the plots of a paper's scenario as SVG elements, of what was kept when it was run; text without any."""
    found = kept().get(name, NEVER_RUN)
    drawn = [
        paper.draw_lines(chart, papers.rows_of(found), paper.kept(found.get("curves", {}).get(chart.title, ())))
        for chart in part.charts
        if chart.of_runs or found["rows"]
    ]
    shown = [
        f"{title}. {note}\n\n<div>{inline(plot, title)}</div>\n\n" for title, note, plot in drawn if plot is not None
    ]
    return "".join(shown)


def pages(scenarios: Sequence[Shipped]) -> dict[str, str]:
    """Return the text of every page by its place, links as they are in the repository."""
    found = {place: (ROOT / place).read_text() for place in guide().values()}
    found |= {f"docs/commands/{name}.md": (ROOT / f"docs/commands/{name}.md").read_text() for name in COMMANDS}
    found |= {f"methods/{name}.md": method_page(method, scenarios) for name, method in METHODS.items()}
    return found | dict(paper_pages(scenarios))


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

    return re.sub(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)", lead, re.sub(r"<!-- /?\w+ -->", "", text))


def navigation() -> list[dict[str, Any]]:
    """Return mkdocs' navigation: titles with their pages, or with a list of such."""
    families = [{title: f"docs/papers/{family}.md"} for family, title in PAPERS.items()]
    return [
        *({title: place} for title, place in guide().items()),
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
    (site / "tables.css").write_text(f":root {{ {colours} }}\n" + (ROOT / "docs/tables.css").read_text())
    # JSON is YAML.
    (folder / "mkdocs.yml").write_text(json.dumps({**SETTINGS, "nav": navigation()}, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
