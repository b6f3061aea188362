"""Lay out the documentation as a site: the pages of ``docs``, and a page for each method, paper and command.

``python docs/website.py FOLDER`` replaces FOLDER by the sources of the site and mkdocs.yml; `make site` builds them
with mkdocs-material.
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
"""Folder in `papers` -> title of the page."""
PAPER_OF = {
    "distributed": "stahl",
    "ftpipehd": "ftpipehd",
    "pipelearn": "pipelearn",
    "edgepipe": "edgepipe",
    "versatile": "versatilefl",
}
"""Method -> folder of its paper."""
SETTINGS: dict[str, Any] = yamltext.values((ROOT / "docs/mkdocs.yml").read_text())
EXTRA = Path("docs/papers.md")
"""Page with the headlines of all papers."""


@dataclass(frozen=True)
class Shipped:
    """A scenario of the testbed."""

    name: str
    """Name for `testbed run`."""
    scenario: Scenario

    @property
    def file(self) -> str:
        """Path in the repository."""
        return find(self.name).resolve().relative_to(ROOT).as_posix()

    @property
    def runs(self) -> int:
        """Number of runs: points of the sweep times repetitions."""
        return len(list(sweep_points(self.scenario))) * self.scenario.repetitions


Navigation = list[dict[str, Any]]
"""Titles, each with a page or a list of further titles."""


def group_pages() -> Navigation:
    """Return the pages of the repository in the groups of mkdocs.yml; pages without a group end the last group."""
    groups: Navigation = [dict(group) for group in SETTINGS["nav"]]
    known = set(page_paths(groups))
    last = next(iter(groups[-1].values()))
    for file in sorted((ROOT / "docs").glob("*.md")):
        place = f"docs/{file.name}"
        if place not in known and place not in ("docs/README.md", str(EXTRA)):
            heading = file.read_text().partition("\n")[0].removeprefix("# ")
            last.append({heading: place})
    return groups


def page_paths(navigation: Navigation) -> Iterator[str]:
    """Yield the pages of a navigation, at all levels.

    >>> list(page_paths([{"Home": "README.md"}, {"Docs": [{"Glossary": "docs/glossary.md"}]}]))
    ['README.md', 'docs/glossary.md']
    """
    for group in navigation:
        for content in group.values():
            if isinstance(content, str):
                yield content
            else:
                yield from page_paths(content)


def load_shipped() -> list[Shipped]:
    """Return every scenario of the testbed."""
    scenarios = []
    for name, file in scenarios_in().items():
        scenarios.append(Shipped(name, load(file)))
    return scenarios


def make_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; empty without rows.

    >>> print(make_table(["option", "default"], [["`rate`", 1]]), end="")
    | option | default |
    | --- | --- |
    | `rate` | 1 |
    <BLANKLINE>
    """
    if not rows:
        return ""
    lines = [header, ["---"] * len(header)]
    for row in rows:
        lines.append([_escape_cell(cell) for cell in row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n"


def _escape_cell(cell: object) -> str:
    return str(cell).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def make_method_page(method: Method, scenarios: Sequence[Shipped]) -> str:
    """Return the page of a method: summary, options, metrics, events and scenarios."""
    summary = method.summary[:1].upper() + method.summary[1:]
    text = f"# {method.name}\n\n{summary}. Tasks: {', '.join(method.tasks)}.\n\n"
    text += inspect.cleandoc(type(method).__doc__ or "") + "\n\n"
    if method.name in PAPER_OF:
        text += f"[Results of the paper beside ours](../papers/{PAPER_OF[method.name]}/README.md).\n\n"
    text += _options_tables(method)
    text += _metrics_table(method)
    text += _events_table(method)
    own = []
    for each in scenarios:
        workload = each.scenario.workload
        # Methods of several tasks may share a name.
        if workload.method.name == method.name and workload.task in method.tasks:
            own.append(each)
    if own:
        text += "## Scenarios\n\n" + _scenario_table(own)
    return text


def _options_tables(method: Method) -> str:
    """Return the options of a method and its baselines as tables."""
    rows = []
    for each in options(method.Options):
        rows.append((f"`{each['name']}`", _default(each), each["description"]))
    text = ""
    if rows:
        text += "## Options\n\nKeys beside `name` in `workload.method`.\n\n"
        text += make_table(("option", "default", "meaning"), rows)
    baselines = []
    for name, values in method.Options.baselines.items():
        baselines.append((f"`baseline: {name}`", f"`{json.dumps(values)}`"))
    return text + make_table(("baseline", "stands for"), baselines)


def _metrics_table(method: Method) -> str:
    rows = []
    for each in method.declared.metrics:
        rows.append((f"`{each.name}`", each.kind, each.meaning))
    if not rows:
        return ""
    text = "## Metrics\n\nIn addition to [the metrics of every method](../docs/scenario/metrics.md).\n\n"
    return text + make_table(("metric", "unit", "meaning"), rows)


def _events_table(method: Method) -> str:
    rows = []
    for each in method.declared.events:
        rows.append((f"`{each.name}`", each.meaning, ", ".join(each.fields)))
    if not rows:
        return ""
    return "## Events\n\n" + make_table(("event", "meaning", "fields"), rows)


def _default(option: Mapping[str, Any]) -> str:
    default = ""
    if option["required"]:
        default = "required"
    elif option["default"] is not None:
        default = f"`{json.dumps(option['default'])}`"
    choices = ", ".join(f"`{each}`" for each in option["choices"])
    return f"{default} (one of {choices})" if choices else default


def _scenario_table(scenarios: Sequence[Shipped]) -> str:
    rows = []
    for each in scenarios:
        link = f"[{each.name}](../{each.file})"
        rows.append((link, each.scenario.description, each.runs))
    return make_table(("scenario", "description", "runs"), rows)


def read_paper_pages() -> Iterator[tuple[str, str]]:
    """Yield the page with the headlines of all papers, and the page of each paper."""
    yield str(EXTRA), (ROOT / EXTRA).read_text()
    for family in PAPERS:
        page = f"papers/{family}/README.md"
        yield page, (ROOT / page).read_text()


def collect_pages(scenarios: Sequence[Shipped]) -> dict[str, str]:
    """Return the text of every page by its path, with links as in the repository."""
    texts = {place: (ROOT / place).read_text() for place in page_paths(group_pages())}
    for name in COMMANDS:
        place = f"docs/commands/{name}.md"
        texts[place] = (ROOT / place).read_text()
    for name, method in METHODS.items():
        texts[f"methods/{name}.md"] = make_method_page(method, scenarios)
    return texts | dict(read_paper_pages())


def rewrite_links(place: str, text: str, known: Mapping[str, str], site: Path) -> str:
    """Return a page with links valid in the site: linked files are copied, links to folders become plain text.

    The marks of generated parts are removed, as mkdocs does not recognize a table directly after a comment.
    """
    folder = Path(place).parent

    def replace_link(match: re.Match[str]) -> str:
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

    unmarked = re.sub(r"<!-- /?\w+ -->", "", text)
    return re.sub(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)", replace_link, unmarked)


def make_navigation() -> Navigation:
    """Return the navigation for mkdocs."""
    families = []
    for family, title in PAPERS.items():
        families.append({title: f"papers/{family}/README.md"})
    return [
        *group_pages(),
        {"Methods": [{name: f"methods/{name}.md"} for name in METHODS]},
        {"Papers": [{"Published and reproduced figures": str(EXTRA)}, *families]},
        {"Commands": [{name: f"docs/commands/{name}.md"} for name in COMMANDS]},
    ]


def main(folder: Path) -> None:
    """Write the sources of the site for mkdocs."""
    site = folder / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    texts = collect_pages(load_shipped())
    for place, text in texts.items():
        file = site / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(rewrite_links(place, text, texts, site))
    colours = " ".join(f"--{name}: {colour};" for name, colour in COLOURS.items())
    styles = (ROOT / "docs/tables.css").read_text()
    (site / "tables.css").write_text(f":root {{ {colours} }}\n{styles}")
    # JSON is valid YAML.
    settings = json.dumps({**SETTINGS, "nav": make_navigation()}, indent=2)
    (folder / "mkdocs.yml").write_text(settings)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
