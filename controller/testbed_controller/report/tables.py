"""Tables as plain data, rendered for a terminal and in LaTeX.

A `Section` is a table with its title. Templates render the same sections for pages: HTML files such as report.html.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from testbed.common import formats
from testbed.common.formats import escape_control

Tone = Literal["", "yes", "no"]
"""Whether a text reports success (green) or failure (red); empty for neither."""
BAR_ACTIVITIES = ("compute", "communicate", "down")
"""Activities drawn in the time bar of a device."""
BAR_LENGTH = 16
"""Length of a time bar in characters."""
WIDE = 100
"""Minimum terminal width for optional columns."""
LONGEST_UNWRAPPED = 18
"""Maximum length of names that are never wrapped, to save space for values."""
TONE_STYLES: dict[Tone, str] = {"": "", "yes": "green", "no": "red"}
"""Style of the terminal for each tone."""
LATEX_ESCAPES = str.maketrans(
    {
        # Characters with a meaning in LaTeX.
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\n": " ",
        # Signs of our tables that pdflatex knows as commands only.
        "±": r"$\pm$",
        "×": r"$\times$",
        "→": r"$\to$",
        "↔": r"$\leftrightarrow$",
        "µ": r"\textmu{}",
        "–": "--",
        "✔": "yes",
        "✘": "no",
        "≥": r"$\geq$",
        "≤": r"$\leq$",
        "\u00a0": "~",
        "…": r"\ldots{}",
        "−": "$-$",
        "°": r"\textdegree{}",
        "²": r"\textsuperscript{2}",
        "³": r"\textsuperscript{3}",
        # The mark of simulated runs, whose heading says "simulated" as well.
        "◌": "",
        # Letters without a glyph in T1 fonts.
        "Ħ": "H",
        "ħ": "h",
        "ĸ": "k",
        "Ŧ": "T",
        "ŧ": "t",
    }
)
"""LaTeX code of characters that pdflatex would misread or reject."""
LAST_LATIN = "\u017f"
"""Last letter with a glyph in pdflatex's T1 fonts; pdflatex rejects later letters.

Letters from U+0100 on need ``\\usepackage[T1]{fontenc}``."""


@dataclass(frozen=True)
class Cell:
    """Contents of a table cell."""

    text: str
    note: str = ""
    """Smaller text beside or below, such as an interval."""
    tone: Tone = ""
    shares: Mapping[str, float] | None = None
    """Shares of `BAR_ACTIVITIES`, drawn as a bar."""
    hint: str = ""
    """Tooltip on a page."""
    sort_key: float | str | None = None
    """Value by which a page sorts the rows; None for the text."""
    links: Sequence[tuple[str, str]] = ()
    """Texts with their link targets, shown on a page instead of the text."""


@dataclass(frozen=True)
class Column:
    """Heading and cell type of a column."""

    heading: str
    kind: Literal["name", "text", "number"] = "text"
    """Numbers are aligned on the right."""
    shown_on: Literal["", "wide", "page"] = ""
    """Where the column is shown: everywhere, on pages and on terminals from `WIDE` on, or on pages alone."""


@dataclass(frozen=True)
class Section:
    """A table with title and note."""

    title: str
    note: str
    """Explanation of the values, for a page."""
    terminal_note: str
    """A shorter explanation for the terminal: a phrase without a full stop."""
    columns: tuple[Column, ...]
    rows: list[list[Cell]]
    max_printed_rows: int = 1000
    """Maximum number of rows on the terminal; a negative number selects the last rows."""
    sortable: bool = False
    """Whether a click on a heading of a page sorts the rows."""
    omitted_rows: int = 0
    """Number of further rows that the section lacks, for pages as well (`thinning.limit_rows`)."""
    complete_file: str = "metrics.json"
    """File with all rows, relative to the page."""


def plain_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> Section:
    """Return a table of texts without a title.

    >>> plain_table([Column("Device", "name")], [["a"], ["b"]]).rows[1][0].text
    'b'
    """
    cells = [[Cell(text) for text in row] for row in rows]
    return Section("", "", "", tuple(columns), cells)


def number_columns(
    *headings: str, shown_on: Literal["", "wide", "page"] = ""
) -> tuple[Column, ...]:
    """Return right-aligned columns with these headings.

    >>> [column.heading for column in number_columns("Sent", "Received")]
    ['Sent', 'Received']
    """
    return tuple(Column(heading, "number", shown_on) for heading in headings)


class VisibleConsole(Console):
    """Console that escapes control characters, because names and messages come from scenarios and devices."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield the segments of a printed object, with control characters as visible escapes."""
        for text, style, control in super().render(renderable, options):
            if not control and not text.isprintable():
                # `escape_control` truncates long texts; an escape has at most 8 characters, so this limit keeps all.
                text = escape_control(text, max_characters=8 * len(text))
            yield Segment(text, style, control)

    def on_broken_pipe(self) -> None:
        """Leave the error to the command line; rich would exit with status 1, the status of a failed run."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def draw_section(section: Section, width: int) -> Group:
    """Render a section for a terminal of the given width.

    In a table too wide for the terminal, notes of numbers move below their numbers, and cells are wrapped.
    """
    rows = _printed_rows(section)
    # If the terminal shows the last rows, all omitted rows are earlier ones.
    before = " before them" if section.max_printed_rows < 0 else ""
    table = _fitted_table(section, rows, width)
    parts: list[RenderableType] = [table]
    # Numbers of rows that the terminal lacks, by the file that has these rows.
    hidden_rows = {
        "the report": len(section.rows) - len(rows),
        section.complete_file: section.omitted_rows,
    }
    notes = []
    for file, count in hidden_rows.items():
        if count:
            notes.append(f"{count:,} more{before} in {file}")
    if notes:
        parts.append(Text(f"  and {', '.join(notes)}", style="dim"))
    if not section.title:
        return Group(*parts)
    # Outside the table, since rich wraps a table's own title at the width of the table.
    title = Text(f" {section.title}", style="bold")
    if section.terminal_note:
        # One space before the title, and two before the note.
        fits = len(section.title) + len(section.terminal_note) + 3 < width
        gap = "  " if fits else "\n "
        title.append(f"{gap}{section.terminal_note}", style="not bold dim")
    return Group(title, *parts, Text())


def _printed_rows(section: Section) -> Sequence[Sequence[Cell]]:
    """Return the rows for the terminal: the first ones, or the last ones if their maximum number is negative."""
    if section.max_printed_rows < 0:
        return section.rows[section.max_printed_rows :]
    return section.rows[: section.max_printed_rows]


_RULER = Console(width=100_000)
"""A console for measurements, on which nothing is printed; its width never wraps a table."""


def split_wide(section: Section, row_heading: str, width: int) -> list[Section]:
    """Divide a table that is too wide for the terminal into several tables, so that no word is broken across lines.

    All tables have the same rows, numbered under ``row_heading``. The first table has the columns of kind ``name``, as
    a legend of the numbers, and the others have the remaining columns. A table that fits is returned unchanged.
    """
    if _fits(section, width):
        return [section]
    name_indices = []
    other_indices = []
    for index, column in enumerate(section.columns):
        if column.kind == "name":
            name_indices.append(index)
        else:
            other_indices.append(index)
    parts = []
    for indices in (name_indices, other_indices):
        if indices:
            parts += _split_columns(section, indices, row_heading, width)
    # The title above the first table is that of all tables.
    untitled = [replace(part, title="", terminal_note="") for part in parts[1:]]
    return [parts[0], *untitled]


def _split_columns(
    section: Section, indices: Sequence[int], row_heading: str, width: int
) -> list[Section]:
    """Return the columns at these indices as one table with numbered rows, or as several if one is too wide."""
    rows = []
    for number, row in enumerate(section.rows, 1):
        rows.append([Cell(str(number)), *(row[index] for index in indices)])
    columns = [Column(row_heading, "name")]
    columns += [section.columns[index] for index in indices]
    part = replace(section, columns=tuple(columns), rows=rows)
    if len(indices) == 1 or _fits(part, width):
        return [part]
    half = (len(indices) + 1) // 2
    first = _split_columns(section, indices[:half], row_heading, width)
    return first + _split_columns(section, indices[half:], row_heading, width)


def _fits(section: Section, width: int) -> bool:
    """Return whether a section can be drawn at the given width without breaking a word across lines.

    Rich breaks words without any notice if a table is too narrow, so the drawn words are compared with the words of the
    cells.
    """
    table = _fitted_table(section, _printed_rows(section), width)
    expected: set[str] = set()
    for column in table.columns:
        for text in (column.header, *column.cells):
            expected.update(str(text).split())
    drawn: set[str] = set()
    for line in _RULER.render_lines(table, _RULER.options.update(width=width)):
        drawn.update("".join(segment.text for segment in line).split())
    return expected <= drawn


def _fitted_table(
    section: Section, rows: Sequence[Sequence[Cell]], width: int
) -> Table:
    """Return the rows as a table, in the narrow form of `_make_table` if the usual form is wider than the terminal."""
    table = _make_table(section, rows, width)
    if _RULER.measure(table).maximum > width:
        table = _make_table(section, rows, width, is_narrow=True)
    return table


def _make_table(
    section: Section,
    rows: Sequence[Sequence[Cell]],
    width: int,
    *,
    is_narrow: bool = False,
) -> Table:
    """Return the rows as a table; a narrow one has no padding, and notes below their numbers."""
    shown = []
    for index, column in enumerate(section.columns):
        if _is_shown(column, width):
            shown.append((index, column))
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        header_style="dim",
        show_header=any(column.heading for _, column in shown),
        padding=(0, 0 if is_narrow else 1),
    )
    for index, column in shown:
        texts = [column.heading, *(row[index].text for row in rows)]
        longest = max(len(text) for text in texts)
        table.add_column(
            # As `Text`, since rich reads brackets in a label as its markup.
            Text(column.heading),
            style="bold" if column.kind == "name" else "",
            justify="right" if column.kind == "number" else "left",
            overflow="fold",
            no_wrap=column.kind == "name" and longest <= LONGEST_UNWRAPPED,
        )
    separator = "\n" if is_narrow else " "
    for row in rows:
        cells = [_cell_text(row[index], column, separator) for index, column in shown]
        table.add_row(*cells)
    return table


def _is_shown(column: Column, width: int) -> bool:
    """Return whether a column is shown on a terminal of the given width."""
    return not column.shown_on or (column.shown_on == "wide" and width >= WIDE)


def _cell_text(cell: Cell, column: Column, separator: str) -> Text:
    """Render a cell, with ``separator`` between a number and its note."""
    if cell.text == formats.NONE and column.kind == "number":
        return Text(cell.text, style="dim")
    text = Text(cell.text, style=TONE_STYLES[cell.tone])
    if cell.shares is not None:
        text = _time_bar(cell.shares)
    # In optional columns, which are the least important, the terminal omits notes.
    if cell.note and not column.shown_on:
        gap = separator if column.kind == "number" else "\n"
        text.append(gap + cell.note, style="dim")
    return text


def _time_bar(shares: Mapping[str, float]) -> Text:
    """Draw the activities of a device as a bar; the remainder is idle time."""
    text = Text()
    drawn_length = 0
    exact_length = 0.0
    styles = ("blue", "yellow", "red")
    for activity, style in zip(BAR_ACTIVITIES, styles, strict=True):
        # The ends of the activities are rounded; the sum of rounded lengths could exceed the bar.
        exact_length += shares[activity] * BAR_LENGTH
        length = min(BAR_LENGTH, round(exact_length)) - drawn_length
        text.append("█" * length, style=style)
        drawn_length += length
    return text.append("░" * (BAR_LENGTH - drawn_length), style="dim")


def latex(section: Section) -> str:
    r"""Return a section as a LaTeX table, which needs the package booktabs.

    >>> print(latex(plain_table([Column("rate")], [["5 %"]])))
    \begin{tabular}{l}
    \toprule
    rate \\
    \midrule
    5 \% \\
    \bottomrule
    \end{tabular}
    <BLANKLINE>
    """
    shown = []
    for index, column in enumerate(section.columns):
        if column.shown_on != "page":
            shown.append((index, column))
    alignments = ""
    headings = []
    for _, column in shown:
        alignments += "r" if column.kind == "number" else "l"
        headings.append(column.heading)
    lines = [rf"\begin{{tabular}}{{{alignments}}}", r"\toprule"]
    lines += [_latex_row(headings), r"\midrule"]
    for row in section.rows:
        lines.append(_latex_row([_text_and_note(row[index]) for index, _ in shown]))
    lines += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)


def _text_and_note(cell: Cell) -> str:
    return f"{cell.text} {cell.note}".strip()


def _latex_row(texts: Sequence[str]) -> str:
    escaped = " & ".join(_latex_text(text) for text in texts)
    return rf"{escaped} \\"


def _latex_text(text: str) -> str:
    """Escape a text for LaTeX, with a question mark for a character unknown to pdflatex."""
    escaped = ""
    for character in text.translate(LATEX_ESCAPES):
        is_latin = character.isalpha() and character <= LAST_LATIN
        # Omitting an unknown character could change a value, or make two labels equal.
        escaped += character if character.isascii() or is_latin else "?"
    return escaped.strip()
