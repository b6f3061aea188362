"""The generated Markdown of a paper's README and of the page with the headlines of all papers.

A system is a published paper with its folder. A figure, table or section of the paper (``item``) has several rows, the
claims of `testbed_comparison.rows`; each has a word such as "agrees" (`testbed_comparison.words`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from testbed_comparison.cells import (
    NONE,
    format_comparison,
    format_number,
    format_our_range,
    format_our_value,
    format_paper_range,
    format_paper_value,
)
from testbed_comparison.clocks import Clocks
from testbed_comparison.results import Results
from testbed_comparison.rows import Figures, Headline, ParameterValue, Row, Sensitivity
from testbed_comparison.words import WORDS, OurValue, Word, word_for

MARK = re.compile(r"<!-- comparison -->\n.*?<!-- /comparison -->", re.DOTALL)
"""The generated part of a page; everything outside is written by hand."""
WORDS_NOTE = (
    "[docs/papers.md](../../docs/papers.md) defines the words.\n"
    "Our values are simulated on the virtual clock, except those under *In containers*."
)
LONG_TABLE = 15
"""Number of lines from which a table is folded."""
VALUES_PER_LINE = 3
"""Maximum number of values of a parameter in one line of the sensitivity table."""
CONDITION = "open or other condition"
"""Heading of the conditions that a paper leaves open, or in which our runs differ from the paper."""
HEADLINE_COLUMNS = ("claim", "paper", "ours", "ours / paper", CONDITION, "word")
TOO_WIDE = "our interval contains the paper's value, but is too wide"
Item = TypeVar("Item")
Line = Sequence[str]
"""The cells of one line of a table."""


@dataclass(frozen=True)
class System:
    """One paper's figures with our results."""

    folder: Path
    figures: Figures
    results: Results
    clocks: Clocks | None = None

    def ours(self, row: Row) -> OurValue | None:
        """Return our value of a row."""
        ours = self.results.ours(row.scenario, row.expressions, row.unit)
        if ours is not None and row.largest:
            return replace(ours, low=ours.high)
        return ours

    def word(self, row: Row) -> Word:
        """Return the word for our value of a row beside the paper's."""
        return word_for(row, self.ours(row))


def fill_in(page: str, content: str) -> str:
    """Replace the text between the two marks of a page, or append both with the text.

    >>> fill_in("<!-- comparison -->\\nold\\n<!-- /comparison -->\\n", "new")
    '<!-- comparison -->\\nnew\\n<!-- /comparison -->\\n'
    """
    block = f"<!-- comparison -->\n{content}\n<!-- /comparison -->"
    if MARK.search(page):
        # A function as replacement, since backslashes in a replacement text would be escapes.
        return MARK.sub(lambda _: block, page)
    return f"{page.rstrip()}\n\n{block}\n"


def system_page(system: System, plots: Mapping[str, str]) -> str:
    """Return the generated part of one paper's page as Markdown.

    The headlines and a summary by word come first, then conditions, all rows, plots, sensitivity, the comparison of
    both clocks, and the provenance of the runs. ``plots`` maps the title of each plot to its file.
    """
    blocks = [
        _summary_section(system),
        _conditions_section(system),
        _figures_section(system),
        _plots_table(plots),
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
    lines = []
    for name, system in systems.items():
        link = f"[{system.figures.paper}](../papers/{name}/README.md)"
        for headline in system.figures.headlines:
            lines.append([link, *_headline_cells(system, headline)])
            # Only the first headline of a paper has its name.
            link = ""
    return _table(["", *HEADLINE_COLUMNS], lines)


def clocks_page(systems: Mapping[str, System]) -> str:
    """Return the ratio of both clocks for each metric of the short figure of each paper as Markdown."""
    lines = []
    for system in systems.values():
        first_cells = [system.figures.paper, _short_figure(system)]
        for cells in _clock_cells(system):
            lines.append([*first_cells, *cells])
            first_cells = ["", ""]
    heading = ["", "figure", "metric", "containers", "simulated", "ratio", "verdict"]
    text = (
        "One short figure of each paper was also run in containers (`testbed papers --containers`). A ratio of 1\n"
        "means that both clocks agree. *Not trusted* means that the host was too slow for containers, so the ratio\n"
        "describes the host. Losses are drawn equally on both clocks and slots follow the clock, so the ratios of\n"
        "EdgePipe and VersatileFL show only that no slot was missed."
    )
    return f"{text}\n\n{_table(heading, lines)}"


def _summary_section(system: System) -> str:
    """Return the headlines of the paper, and the figures with each word."""
    blocks = ["## At a glance"]
    headlines = []
    for headline in system.figures.headlines:
        headlines.append(list(_headline_cells(system, headline)))
    if headlines:
        blocks.append(_table(HEADLINE_COLUMNS, headlines))
    rows = system.figures.rows
    blocks.append(f"{len(rows)} rows: {_count_words(system, rows)}. {WORDS_NOTE}")
    lines = _lines_by_word(system, rows)
    blocks.append(_table(["word", "rows", "figures"], lines))
    return "\n\n".join(blocks)


def _lines_by_word(system: System, rows: Iterable[Row]) -> Iterator[Line]:
    """Yield a line for each word: the number of rows with this word, and the figures of these rows."""
    words = {row.name: system.word(row) for row in rows}
    groups = _group_by_item(rows)
    for word in WORDS:
        items = []
        total = 0
        for item, members in groups.items():
            count = 0
            for row in members:
                count += words[row.name] == word
            total += count
            if count == len(members):
                items.append(item)
            elif count:
                items.append(f"{item} ({count} of {len(members)})")
        if total:
            yield [word, str(total), "; ".join(items)]


def _group_by_item(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each figure, table or section, in the order of their first rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.item, []).append(row)
    return groups


def _headline_cells(system: System, headline: Headline) -> Iterator[str]:
    rows = [system.figures.row(name) for name in headline.rows]
    differs = []
    if headline.differs:
        differs.append(headline.differs)
    yield headline.claim
    if len(rows) == 1:
        yield format_paper_value(rows[0])
        ours = system.ours(rows[0])
        yield format_our_value(ours, rows[0].unit)
        if _is_too_wide(system, rows[0]):
            differs.append(TOO_WIDE)
    else:
        yield from _value_ranges(system, rows)
    yield format_comparison((row, system.ours(row)) for row in rows)
    yield "; ".join(differs)
    words = {system.word(row) for row in rows}
    if len(words) == 1:
        yield words.pop()
    else:
        yield _count_words(system, rows)


def _value_ranges(system: System, rows: list[Row]) -> tuple[str, str]:
    """Return the ranges of the paper's and of our values in several rows, or only the number of rows."""
    units = {row.unit for row in rows}
    # Formulas count elements, operations and slots as plain numbers, so a common range would mix them.
    are_counts = units == {""} and rows[0].kind == "arithmetic"
    if len(units) > 1 or are_counts:
        return f"{len(rows)} values", ""
    values = []
    for row in rows:
        ours = system.ours(row)
        if ours is not None:
            values.append(ours)
    return format_paper_range(rows), format_our_range(values, rows[0].unit)


def _count_words(system: System, rows: Iterable[Row]) -> str:
    """Return how many rows have each word, as text."""
    counts = Counter(system.word(row) for row in rows)
    parts = []
    for word in WORDS:
        if counts[word]:
            parts.append(f"{counts[word]} {word}")
    return ", ".join(parts)


def _is_too_wide(system: System, row: Row) -> bool:
    """Return whether a row differs only because of the width of our interval.

    Such an interval contains the paper's value, so a reader should not conclude that the values contradict each other.
    """
    ours = system.ours(row)
    if row.kind == "ranking" or ours is None or ours.half_width is None:
        return False
    if system.word(row) != "differs" or not isinstance(row.paper, str):
        return False
    return ours.minimum <= float(row.paper) <= ours.maximum


def _conditions_section(system: System) -> str:
    lines = []
    for each in system.figures.conditions:
        lines.append([each.condition, each.reason])
    return "\n\n".join(
        [
            "## Default conditions",
            "Chosen before the runs, except those in a table of corrections below.",
            _table(["condition", "reason"], lines),
        ]
    )


def _figures_section(system: System) -> str:
    """Return the table of all rows, and a numbered list of remarks, since many rows share a remark."""
    rows = system.figures.rows
    remarks: dict[str, int] = {}
    lines = []
    for item, members in _group_by_item(rows).items():
        item_cell = item
        for row in members:
            ours = system.ours(row)
            numbers = []
            for remark in _remarks(system, row):
                # Equal remarks have one number, in the order of their first use.
                number = remarks.setdefault(remark, len(remarks) + 1)
                numbers.append(str(number))
            lines.append(
                [
                    item_cell,
                    row.name,
                    format_paper_value(row),
                    format_our_value(ours, row.unit),
                    str(ours.runs) if ours else "",
                    system.word(row),
                    ", ".join(numbers),
                ]
            )
            item_cell = ""
    content = _table(["", "", "paper", "ours", "runs", "word", "remarks"], lines)
    if remarks:
        texts = [f"{number}. {remark}" for remark, number in remarks.items()]
        content += "\n\nRemarks:\n\n" + "\n".join(texts)
    return f"## Figures\n\n{_fold(f'All {len(rows)} rows', content, len(rows))}"


def _remarks(system: System, row: Row) -> Iterator[str]:
    if row.fitted:
        yield f"fitted: {row.fitted}"
    if row.data:
        yield f"data: {row.data}"
    if row.other_metric:
        yield f"metric: {row.other_metric}"
    if row.note:
        yield row.note
    if _is_too_wide(system, row):
        yield TOO_WIDE
    failed = system.results.failed_runs(row.scenario)
    if failed:
        yield f"runs of this scenario that the method ended with an error, and that have no value: {failed}"


def _plots_table(plots: Mapping[str, str]) -> str:
    """Return a table with two plots per line and an empty heading."""
    pictures = [f"![{title}]({path})" for title, path in plots.items()]
    if not pictures:
        return ""
    if len(pictures) % 2:
        pictures.append("")
    return _table(["", ""], _chunks(pictures, 2))


def _sensitivity_section(system: System) -> str:
    if not system.figures.sensitivity:
        return ""
    lines = [*_sensitivity_lines(system)]
    heading = ["row", "paper", "default", "parameter", "other values"]
    content = _table(heading, lines)
    return "\n\n".join(
        [
            "## Sensitivity",
            "One parameter is changed at a time, unless several are named. A value without an interval is that of one\n"
            "seed, or a time.",
            _fold("All parameters", content, len(lines)),
        ]
    )


def _sensitivity_lines(system: System) -> Iterator[Line]:
    """Yield a line for each row and parameter, or several lines for many values of the parameter."""
    # The file lists parameters in the order in which they were tested, so the entries of a row are not adjacent.
    tests_of_rows: dict[str, list[Sensitivity]] = {}
    for test in system.figures.sensitivity:
        tests_of_rows.setdefault(test.row, []).append(test)
    for name, tests in tests_of_rows.items():
        row = system.figures.row(name)
        ours = format_our_value(system.ours(row), row.unit)
        row_cells = [name, format_paper_value(row), ours]
        for test in tests:
            parameter = test.parameter
            for values in _chunks(test.values, VALUES_PER_LINE):
                texts = [_describe_effect(system, row, value) for value in values]
                yield [*row_cells, parameter, "; ".join(texts)]
                row_cells = ["", "", ""]
                parameter = ""


def _describe_effect(system: System, row: Row, value: ParameterValue) -> str:
    """Return a value of a parameter, and our resulting value of the row."""
    unit = value.unit or row.unit
    expressions = value.expressions(row)
    ours = system.results.ours(value.scenario, expressions, unit)
    return f"{value.value}: {format_our_value(ours, unit)}"


def _clocks_section(system: System) -> str:
    """Return the comparison of both clocks, with date and host."""
    if system.figures.containers is None:
        return ""
    heading = ["metric", "containers", "simulated", "ratio", "verdict"]
    blocks = [
        "## In containers",
        f"{_short_figure(system)}, one run on each clock.",
        _table(heading, _clock_cells(system)),
    ]
    clocks = system.clocks
    if clocks is not None:
        source = f"{clocks.date}, {clocks.processor}, revision {clocks.revision[:8]}"
        blocks.append(f"{source}: [containers.json](containers.json) has the command.")
    return "\n\n".join(blocks)


def _short_figure(system: System) -> str:
    """Return the name of the figure run on both clocks."""
    short_figure = system.figures.containers
    return NONE if short_figure is None else short_figure.figure


def _clock_cells(system: System) -> Iterator[Line]:
    """Yield a line for each metric: the name, both values, their ratio and the verdict."""
    short_figure = system.figures.containers
    clocks = system.clocks
    if short_figure is None:
        return
    for metric in short_figure.metrics:
        if clocks is None or metric not in clocks.containers:
            yield [metric, NONE, NONE, NONE, "not run"]
            continue
        yield [
            metric,
            format_number(clocks.containers[metric]),
            format_number(clocks.simulated[metric]),
            f"{clocks.ratio(metric):.3f}",
            clocks.verdict,
        ]


def _runs_section(system: System) -> str:
    """Return the provenance of all runs, with a line for each processor and version of torch."""
    records_of_hosts: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in system.results.scenarios.values():
        records_of_hosts.setdefault(_host_cells(record), []).append(record)
    lines = []
    for (processor, torch), records in sorted(records_of_hosts.items()):
        runs = sum(record["runs"] for record in records)
        dates = sorted({record["date"] for record in records})
        revisions = {str(record["revision"])[:8] for record in records}
        lines.append(
            [
                str(len(records)),
                str(runs),
                ", ".join(dates),
                ", ".join(sorted(revisions)),
                processor,
                torch,
            ]
        )
    blocks = ["## Runs"]
    missing = system.results.scenarios_to_run(system.figures)
    if missing:
        blocks.append(f"Not run yet, or stale: {', '.join(missing)}.")
    heading = ["scenarios", "runs", "dates", "revisions", "processor", "torch"]
    blocks.append(_table(heading, lines))
    blocks.append(
        "[results.json](results.json) has command, seeds, date and revision of each scenario."
    )
    return "\n\n".join(blocks)


def _host_cells(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the processors and the versions of torch of a scenario's runs, each as text."""
    processors = set()
    versions = set()
    for host in record["computing"]:
        processors.add(f"{host['processor']} ({host['instruction_set']})")
        versions.add(host["torch"])
    return ", ".join(sorted(processors)), ", ".join(sorted(versions))


def _table(heading: Line, lines: Iterable[Line]) -> str:
    """Return a Markdown table."""
    rule = ["---"] * len(heading)
    texts = [f"| {' | '.join(heading)} |", f"|{'|'.join(rule)}|"]
    for line in lines:
        texts.append(f"| {' | '.join(line)} |")
    return "\n".join(texts)


def _fold(summary: str, content: str, lines: int) -> str:
    """Fold content of many lines, which a reader unfolds by a click on the summary."""
    if lines < LONG_TABLE:
        return content
    # GitHub needs the empty lines, and mkdocs the attribute, to read the content as Markdown.
    opening = f'<details markdown="1"><summary>{summary}</summary>'
    return f"{opening}\n\n{content}\n\n</details>"


def _chunks(values: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
