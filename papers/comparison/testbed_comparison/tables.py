"""Tables of a system's README and of the page with the headlines of all papers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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


def fill_in(page: str, content: str) -> str:
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
        _conditions_section(system),
        _figures_section(system),
        *pictures,
        _sensitivity_section(system),
        _clocks_section(system),
        _runs_section(system),
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
            lines.append(
                f"| {link} | {' | '.join(_headline_cells(system, headline))} |"
            )
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
        cells = next(_clock_cells(system), None)
        if cells is not None:
            line = [system.figures.paper, _figure_of(system), *cells]
            lines.append(f"| {' | '.join(line)} |")
    return "\n".join(lines)


def _clocks_section(system: System) -> str:
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
    lines += [f"| {' | '.join(cells)} |" for cells in _clock_cells(system)]
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


def _clock_cells(system: System) -> Iterator[list[str]]:
    """Yield metric, both values, their ratio and the verdict."""
    wanted, clocks = system.figures.containers, system.clocks
    for metric in wanted.metrics if wanted is not None else ():
        if clocks is None or metric not in clocks.containers:
            yield [metric, NONE, NONE, NONE, "not run"]
            continue
        yield [
            metric,
            _format_number(clocks.containers[metric]),
            _format_number(clocks.simulated[metric]),
            f"{clocks.ratio(metric):.3f}",
            clocks.verdict,
        ]


def _headline_cells(system: System, headline: Headline) -> Iterator[str]:
    rows = [system.figures.row(name) for name in headline.rows]
    yield headline.claim
    if len(rows) == 1:
        yield _paper_value(rows[0])
        yield _our_value(system.ours(rows[0]), rows[0].unit)
    else:
        yield from _value_ranges(system, rows)
    yield headline.differs
    words = {system.word(row) for row in rows}
    yield words.pop() if len(words) == 1 else _count_words(system, rows)


def _count_words(system: System, rows: Iterable[Row]) -> str:
    """Return how many rows have each word, as text."""
    counts = Counter(system.word(row) for row in rows)
    return ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])


def _value_ranges(system: System, rows: list[Row]) -> tuple[str, str]:
    """Return the least and the largest value of several rows of one unit, the paper's and ours."""
    unit = rows[0].unit
    if any(row.unit != unit for row in rows):
        return f"{len(rows)} figures", ""
    values = [ours for ours in map(system.ours, rows) if ours is not None]
    ours = NONE
    if values:
        least = _format_number(min(value.low for value in values))
        most = _format_number(max(value.high for value in values))
        ours = _with_unit(f"{least}–{most}", unit)
    if rows[0].kind == "ranking":
        paper = f"{len(rows)} rankings"
    else:
        ends = sorted(chain.from_iterable(row.ends for row in rows), key=float)
        text = ends[0] if ends[0] == ends[-1] else f"{ends[0]}–{ends[-1]}"
        paper = _with_unit(text, unit)
    return paper, ours


def _conditions_section(system: System) -> str:
    lines = [
        "### Default conditions",
        "",
        "Chosen before the runs.",
        "",
        "| condition | reason |",
        "|---|---|",
    ]
    for each in system.figures.conditions:
        lines.append(f"| {each.condition} | {each.reason} |")
    return "\n".join(lines)


def _figures_section(system: System) -> str:
    rows = system.figures.rows
    summary = _count_words(system, rows)
    lines = ["### Figures", "", f"{len(rows)} rows: {summary}.", ""]
    lines += [
        "| | | paper | ours | runs | word | remarks |",
        "|---|---|---|---|---|---|---|",
    ]
    item = ""
    for row in rows:
        ours = system.ours(row)
        cells = [
            "" if row.item == item else row.item,
            row.name,
            _paper_value(row),
            _our_value(ours, row.unit),
        ]
        cells += [str(ours.runs) if ours else "", system.word(row), _remarks(row)]
        lines.append(f"| {' | '.join(cells)} |")
        item = row.item
    return "\n".join(lines)


def _remarks(row: Row) -> str:
    remarks = []
    if row.fitted:
        remarks.append(f"fitted: {row.fitted}")
    if row.data:
        remarks.append(f"data: {row.data}")
    if row.note:
        remarks.append(row.note)
    return "; ".join(remarks)


def _sensitivity_section(system: System) -> str:
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
            _paper_value(row),
            _our_value(system.ours(row), row.unit),
            each.parameter,
        ]
        for trial in each.values:
            unit = trial.unit or row.unit
            ours = _our_value(
                system.results.ours(trial.scenario, (trial.ours,), unit), unit
            )
            lines.append(f"| {' | '.join([*head, trial.value, ours])} |")
            head = ["", "", "", ""]
    return "\n".join(lines)


def _runs_section(system: System) -> str:
    """Return where and when the runs were made."""
    missing = system.results.stale(system.figures)
    lines = ["### Runs", ""]
    if missing:
        lines += [f"Not run yet, or stale: {', '.join(missing)}.", ""]
    lines += [
        "| scenario | runs | seeds | date | revision | processor | torch |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, kept in sorted(system.results.scenarios.items()):
        processors = set()
        versions = set()
        for host in kept["computing"]:
            processors.add(f"{host['processor']} ({host['instruction_set']})")
            versions.add(host["torch"])
        cells = [
            name,
            str(kept["runs"]),
            str(len(kept["seeds"])),
            kept["date"],
            str(kept["revision"])[:8],
            ", ".join(sorted(processors)),
            ", ".join(sorted(versions)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Commands and seeds are in [results.json](results.json)."]
    return "\n".join(lines)


def _paper_value(row: Row) -> str:
    if row.kind == "ranking":
        return str(row.paper)
    if isinstance(row.paper, str):
        return _with_unit(row.paper, row.unit)
    low, high = row.paper
    text = f"{low}–{high}"
    if low is None:
        text = f"at most {high}"
    elif high is None:
        text = f"at least {low}"
    return _with_unit(text, row.unit)


def _our_value(ours: Ours | None, unit: str) -> str:
    if ours is None:
        return NONE
    if ours.low != ours.high:
        return _with_unit(
            f"{_format_number(ours.low)}–{_format_number(ours.high)}", unit
        )
    half = "" if ours.half_width is None else f" ± {ours.half_width:.2g}"
    return _with_unit(f"{_format_number(ours.low)}{half}", unit)


def _format_number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _with_unit(text: str, unit: str) -> str:
    return f"{text} {unit}".rstrip() if unit != "x" else text
