"""Tables of a system's README and of the page with the headlines of all papers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from testbed_comparison.clocks import Clocks
from testbed_comparison.results import Results
from testbed_comparison.rows import Figures, Headline, Row
from testbed_comparison.words import WORDS, Ours, Word, word_for

MARK = re.compile(r"<!-- comparison -->\n.*?<!-- /comparison -->", re.DOTALL)
NONE = "–"


@dataclass(frozen=True)
class System:
    """One paper's figures with our results."""

    folder: Path
    figures: Figures
    results: Results
    clocks: Clocks | None = None

    def ours(self, row: Row) -> Ours | None:
        """Return our value of a row."""
        return self.results.ours(row.scenario, row.expressions, row.unit)

    def word(self, row: Row) -> Word:
        """Return the word of a row."""
        return word_for(row, self.ours(row))


def fill(page: str, content: str) -> str:
    """Replace the text between the two marks of a page, or append both with the text."""
    block = f"<!-- comparison -->\n{content}\n<!-- /comparison -->"
    return (
        MARK.sub(lambda _: block, page)
        if MARK.search(page)
        else f"{page.rstrip()}\n\n{block}\n"
    )


def system_page(system: System, plots: Mapping[str, str]) -> str:
    """Return conditions, table, plots and sensitivity of one paper as Markdown."""
    pictures = [f"![{title}]({place})" for title, place in plots.items()]
    blocks = [
        _conditions(system),
        _rows(system),
        *pictures,
        _sensitivity(system),
        _clocks(system),
        _provenance(system),
    ]
    return "\n\n".join(block for block in blocks if block)


def all_papers_page(systems: Mapping[str, System]) -> str:
    """Return the headlines of all papers and the comparison of both clocks as Markdown."""
    return f"{headline_page(systems)}\n\n{clocks_page(systems)}"


def headline_page(systems: Mapping[str, System]) -> str:
    """Return the table of the headlines of all papers as Markdown."""
    lines = [
        "| | claim | paper | ours | what differs | word |",
        "|---|---|---|---|---|---|",
    ]
    for name, system in systems.items():
        link = f"[{system.figures.paper}](../papers/{name}/README.md)"
        for headline in system.figures.headlines:
            lines.append(f"| {link} | {' | '.join(_headline(system, headline))} |")
            link = ""
    return "\n".join(lines)


def clocks_page(systems: Mapping[str, System]) -> str:
    """Return the ratio of both clocks for the first metric of each paper as Markdown."""
    lines = [
        "One short figure of each paper was also run in containers (`testbed papers --containers`); a ratio of 1 means",
        "that both clocks agree.",
        "",
        "| | figure | metric | containers | simulated | ratio | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for system in systems.values():
        cells = next(_clock_rows(system), None)
        if cells is not None:
            line = [system.figures.paper, _figure_of(system), *cells]
            lines.append(f"| {' | '.join(line)} |")
    return "\n".join(lines)


def _clocks(system: System) -> str:
    """Return the comparison of both clocks, with its date and host."""
    if system.figures.containers is None:
        return ""
    lines = [
        "### In containers",
        "",
        f"{_figure_of(system)}, one run on each clock.",
        "",
    ]
    lines += [
        "| metric | containers | simulated | ratio | verdict |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(cells)} |" for cells in _clock_rows(system)]
    clocks = system.clocks
    if clocks is not None:
        lines += [
            "",
            f"{clocks.date}, {clocks.processor}, revision {clocks.revision[:8]}:",
            "",
            f"    {clocks.command}",
        ]
    return "\n".join(lines)


def _figure_of(system: System) -> str:
    wanted = system.figures.containers
    return NONE if wanted is None else wanted.figure


def _clock_rows(system: System) -> Iterator[list[str]]:
    """Yield metric, both values, their ratio and the verdict."""
    wanted, clocks = system.figures.containers, system.clocks
    for metric in wanted.metrics if wanted is not None else ():
        if clocks is None or metric not in clocks.containers:
            yield [metric, NONE, NONE, NONE, "not run"]
            continue
        yield [
            metric,
            _number(clocks.containers[metric]),
            _number(clocks.simulated[metric]),
            f"{clocks.ratio(metric):.3f}",
            clocks.verdict,
        ]


def _headline(system: System, headline: Headline) -> Iterator[str]:
    rows = [system.figures.row(name) for name in headline.rows]
    yield headline.claim
    if len(rows) == 1:
        yield _paper(rows[0])
        yield _ours(system.ours(rows[0]), rows[0].unit)
    else:
        yield from _range(system, rows)
    yield headline.differs
    words = Counter(system.word(row) for row in rows)
    found = [word for word in WORDS if words[word]]
    yield (
        found[0]
        if len(found) == 1
        else ", ".join(f"{words[word]} {word}" for word in found)
    )


def _range(system: System, rows: list[Row]) -> tuple[str, str]:
    """Return the least and the largest value of several rows of one unit, the paper's and ours."""
    unit = rows[0].unit
    if any(row.unit != unit for row in rows):
        return f"{len(rows)} figures", ""
    values = [ours for ours in map(system.ours, rows) if ours is not None]
    ours = (
        [
            _number(min(each.low for each in values)),
            _number(max(each.high for each in values)),
        ]
        if values
        else []
    )
    if rows[0].kind == "ranking":
        paper = f"{len(rows)} rankings"
    else:
        ends = sorted(chain.from_iterable(row.ends for row in rows), key=float)
        paper = _with_unit("–".join(dict.fromkeys([ends[0], ends[-1]])), unit)
    return paper, _with_unit("–".join(ours), unit) if ours else NONE


def _conditions(system: System) -> str:
    lines = [
        "### Default conditions",
        "",
        "Chosen before the runs.",
        "",
        "| condition | reason |",
        "|---|---|",
    ]
    return "\n".join(
        [
            *lines,
            *(
                f"| {each.condition} | {each.reason} |"
                for each in system.figures.conditions
            ),
        ]
    )


def _rows(system: System) -> str:
    words = Counter(system.word(row) for row in system.figures.rows)
    summary = ", ".join(f"{words[word]} {word}" for word in WORDS if words[word])
    lines = ["### Figures", "", f"{len(system.figures.rows)} rows: {summary}.", ""]
    lines += [
        "| | | paper | ours | runs | word | remarks |",
        "|---|---|---|---|---|---|---|",
    ]
    item = ""
    for row in system.figures.rows:
        ours = system.ours(row)
        cells = [
            "" if row.item == item else row.item,
            row.name,
            _paper(row),
            _ours(ours, row.unit),
        ]
        cells += [str(ours.runs) if ours else "", system.word(row), _remarks(row)]
        lines.append(f"| {' | '.join(cells)} |")
        item = row.item
    return "\n".join(lines)


def _remarks(row: Row) -> str:
    fitted = f"fitted: {row.fitted}" if row.fitted else ""
    data = f"data: {row.data}" if row.data else ""
    return "; ".join(filter(None, (fitted, data, row.note)))


def _sensitivity(system: System) -> str:
    if not system.figures.sensitivity:
        return ""
    lines = [
        "### Sensitivity",
        "",
        "One parameter is changed at a time, unless several are named.",
        "",
    ]
    lines += [
        "| row | paper | default | parameter | value | ours |",
        "|---|---|---|---|---|---|",
    ]
    for each in system.figures.sensitivity:
        row = system.figures.row(each.row)
        head = [
            row.name,
            _paper(row),
            _ours(system.ours(row), row.unit),
            each.parameter,
        ]
        for trial in each.values:
            unit = trial.unit or row.unit
            ours = _ours(system.results.ours(trial.scenario, (trial.ours,), unit), unit)
            lines.append(f"| {' | '.join([*head, trial.value, ours])} |")
            head = ["", "", "", ""]
    return "\n".join(lines)


def _provenance(system: System) -> str:
    """Return where and when the runs were made."""
    found = system.results.scenarios
    missing = system.results.stale(system.figures)
    lines = ["### Runs", ""]
    if missing:
        lines += [f"Not run yet, or stale: {', '.join(missing)}.", ""]
    lines += [
        "| scenario | runs | seeds | date | revision | processor | torch |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, each in sorted(found.items()):
        processors = {
            f"{one['processor']} ({one['instruction_set']})"
            for one in each["computing"]
        }
        torch = {one["torch"] for one in each["computing"]}
        cells = [
            name,
            str(each["runs"]),
            str(len(each["seeds"])),
            each["date"],
            str(each["revision"])[:8],
        ]
        lines.append(
            f"| {' | '.join([*cells, ', '.join(sorted(processors)), ', '.join(sorted(torch))])} |"
        )
    return "\n".join(
        [*lines, "", "Commands and seeds are in [results.json](results.json)."]
    )


def _paper(row: Row) -> str:
    if not isinstance(row.paper, tuple):
        return row.paper if row.kind == "ranking" else _with_unit(row.paper, row.unit)
    low, high = row.paper
    if low is None or high is None:
        return _with_unit(
            f"at most {high}" if low is None else f"at least {low}", row.unit
        )
    return _with_unit(f"{low}–{high}", row.unit)


def _ours(ours: Ours | None, unit: str) -> str:
    if ours is None:
        return NONE
    if ours.low != ours.high:
        return _with_unit(f"{_number(ours.low)}–{_number(ours.high)}", unit)
    half = "" if ours.half_width is None else f" ± {ours.half_width:.2g}"
    return _with_unit(f"{_number(ours.low)}{half}", unit)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _with_unit(text: str, unit: str) -> str:
    return f"{text} {unit}".rstrip() if unit != "x" else text
