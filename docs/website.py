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
"""The checkout."""
PAPERS = {
    "stahl": "Stahl et al.: fully distributed inference",
    "ftpipehd": "FTPipeHD",
    "pipelearn": "PipeLearn",
    "edgepipe": "EdgePipe",
    "versatilefl": "VersatileFL",
}
"""Folder in `papers` -> title of the page, in the order of the navigation."""
PAPER_OF = {
    "distributed": "stahl",
    "ftpipehd": "ftpipehd",
    "pipelearn": "pipelearn",
    "edgepipe": "edgepipe",
    "versatile": "versatilefl",
}
"""Method -> folder of its paper."""
SETTINGS: dict[str, Any] = yamltext.values((ROOT / "docs/mkdocs.yml").read_text())
"""The settings of mkdocs, whose navigation has no methods, papers and commands yet."""
PAPERS_PAGE = "docs/papers.md"
"""Page with the headlines of all papers."""


@dataclass(frozen=True)
class ShippedScenario:
    """A scenario of the testbed."""

    name: str
    """Name for `testbed run`, such as ``smoke/pause``."""
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
    # The README of the repository is the first page, and the page of the papers belongs to their group.
    known = {*page_paths(groups), "docs/README.md", PAPERS_PAGE}
    last_group = next(iter(groups[-1].values()))
    for file in sorted((ROOT / "docs").glob("*.md")):
        path = f"docs/{file.name}"
        if path not in known:
            first_line, _, _ = file.read_text().partition("\n")
            last_group.append({first_line.removeprefix("# "): path})
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


def load_shipped() -> list[ShippedScenario]:
    """Return every scenario of the testbed."""
    scenarios = []
    for name, file in scenarios_in().items():
        scenarios.append(ShippedScenario(name, load(file)))
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
    r"""Escape a text for a cell of a Markdown table.

    >>> _escape_cell("a|b <name>")
    'a\\|b &lt;name>'
    """
    # A bar would begin another cell, a `<` an element of HTML, and a line break would end the table.
    return str(cell).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def make_method_page(method: Method, scenarios: Sequence[ShippedScenario]) -> str:
    """Return the page of a method: summary, options, metrics, events and scenarios."""
    summary = method.summary[:1].upper() + method.summary[1:]
    text = f"# {method.name}\n\n{summary}. Tasks: {', '.join(method.tasks)}.\n\n"
    text += inspect.cleandoc(type(method).__doc__ or "") + "\n\n"
    if method.name in PAPER_OF:
        page = f"../papers/{PAPER_OF[method.name]}/README.md"
        text += f"[Results of the paper beside ours]({page}).\n\n"
    text += _options_tables(method)
    text += _metrics_table(method)
    text += _events_table(method)
    own_scenarios = []
    for each in scenarios:
        workload = each.scenario.workload
        # Methods of several tasks may share a name.
        if workload.method.name == method.name and workload.task in method.tasks:
            own_scenarios.append(each)
    if own_scenarios:
        text += "## Scenarios\n\n" + _scenario_table(own_scenarios)
    return text


def _options_tables(method: Method) -> str:
    """Return the options of a method and its baselines as tables."""
    rows = []
    for each in options(method.Options):
        default = _format_default(each)
        rows.append((f"`{each['name']}`", default, each["description"]))
    text = ""
    if rows:
        text += "## Options\n\nKeys beside `name` in `workload.method`.\n\n"
        text += make_table(("option", "default", "meaning"), rows)
    baselines = []
    for name, values in method.Options.baselines.items():
        baselines.append((f"`baseline: {name}`", f"`{json.dumps(values)}`"))
    return text + make_table(("baseline", "stands for"), baselines)


def _metrics_table(method: Method) -> str:
    """Return the section about a method's own metrics; empty without any."""
    rows = []
    for each in method.declared.metrics:
        rows.append((f"`{each.name}`", each.kind, each.meaning))
    if not rows:
        return ""
    text = "## Metrics\n\nIn addition to [the metrics of every method](../docs/scenario/metrics.md).\n\n"
    return text + make_table(("metric", "unit", "meaning"), rows)


def _events_table(method: Method) -> str:
    """Return the section about a method's own events; empty without any."""
    rows = []
    for each in method.declared.events:
        rows.append((f"`{each.name}`", each.meaning, ", ".join(each.fields)))
    if not rows:
        return ""
    return "## Events\n\n" + make_table(("event", "meaning", "fields"), rows)


def _format_default(option: Mapping[str, Any]) -> str:
    """Return the default of an option as Markdown, with the permitted values if there are only some."""
    default = ""
    if option["required"]:
        default = "required"
    elif option["default"] is not None:
        default = f"`{json.dumps(option['default'])}`"
    choices = ", ".join(f"`{each}`" for each in option["choices"])
    return f"{default} (one of {choices})" if choices else default


def _scenario_table(scenarios: Sequence[ShippedScenario]) -> str:
    rows = []
    for each in scenarios:
        link = f"[{each.name}](../{each.file})"
        rows.append((link, each.scenario.description, each.runs))
    return make_table(("scenario", "description", "runs"), rows)


def read_paper_pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of the page with the headlines of all papers, and of the page of each paper."""
    paths = [PAPERS_PAGE]
    for folder in PAPERS:
        paths.append(_paper_page(folder))
    for path in paths:
        yield path, (ROOT / path).read_text()


def _paper_page(folder: str) -> str:
    return f"papers/{folder}/README.md"


def _method_page(name: str) -> str:
    return f"methods/{name}.md"


def _command_page(name: str) -> str:
    return f"docs/commands/{name}.md"


def collect_pages(scenarios: Sequence[ShippedScenario]) -> dict[str, str]:
    """Return the text of every page by its path, with links as in the repository."""
    texts = {}
    for path in [*page_paths(group_pages()), *map(_command_page, COMMANDS)]:
        texts[path] = (ROOT / path).read_text()
    for name, method in METHODS.items():
        texts[_method_page(name)] = make_method_page(method, scenarios)
    return texts | dict(read_paper_pages())


def rewrite_links(page: str, text: str, known: Mapping[str, str], site: Path) -> str:
    """Return a page with links valid in the site: linked files are copied, links to folders become plain text.

    ``page`` is the path of the page in the repository, ``known`` has the pages of the site by path, and ``site`` is the
    folder of the site's pages. The marks of generated parts are removed, as mkdocs does not recognize a table directly
    after a comment.
    """
    folder = Path(page).parent

    def replace_link(match: re.Match[str]) -> str:
        words, target, anchor = match.groups(default="")
        path = os.path.normpath(folder / target)
        # GitHub shows the README of a folder, and the site has a single one.
        if path == "docs/README.md":
            path = "README.md"
        if path not in known:
            if not (ROOT / path).is_file():
                return words
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, site / path)
        return f"[{words}]({os.path.relpath(path, folder)}{anchor})"

    unmarked = re.sub(r"<!-- /?\w+ -->", "", text)
    # [words](target#anchor): a target with a colon is an address, one that begins with # is in the same page.
    return re.sub(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)", replace_link, unmarked)


def make_navigation() -> Navigation:
    """Return the navigation for mkdocs."""
    methods = [{name: _method_page(name)} for name in METHODS]
    papers = [{"Results of the papers": PAPERS_PAGE}]
    for folder, title in PAPERS.items():
        papers.append({title: _paper_page(folder)})
    commands = [{name: _command_page(name)} for name in COMMANDS]
    return [
        *group_pages(),
        {"Methods": methods},
        {"Papers": papers},
        {"Commands": commands},
    ]


def main(folder: Path) -> None:
    """Write the sources of the site for mkdocs into a folder, whose former content is removed."""
    site = folder / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    texts = collect_pages(load_shipped())
    for path, text in texts.items():
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(rewrite_links(path, text, texts, site))
    # The colours of the reports, as variables of CSS.
    colours = " ".join(f"--{name}: {colour};" for name, colour in COLOURS.items())
    styles = (ROOT / "docs/tables.css").read_text()
    (site / "tables.css").write_text(f":root {{ {colours} }}\n{styles}")
    # JSON is valid YAML.
    settings = json.dumps({**SETTINGS, "nav": make_navigation()}, indent=2)
    (folder / "mkdocs.yml").write_text(settings)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
