"""Tables as plain data, rendered on a terminal and in LaTeX; report.html, called the page here, uses a template."""

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

BAR_ACTIVITIES = ("compute", "communicate", "down")
"""Activities drawn in the time bar of a device."""
BAR_LENGTH = 16
"""Length of a time bar in characters."""
WIDE = 100
"""Minimum terminal width for optional columns."""
LONGEST_UNWRAPPED = 18
"""Maximum length of names that are never wrapped, to save space for values."""
TONES = {"": "", "yes": "green", "no": "red"}
LATEX = str.maketrans(
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
        # A mark before the state of a run, which needs no sign of its own.
        "◌": "",
        # Letters without a glyph in T1 fonts.
        "Ħ": "H",
        "ħ": "h",
        "ĸ": "k",
        "Ŧ": "T",
        "ŧ": "t",
    }
)
"""LaTeX of characters that pdflatex would misread or refuse."""
LAST_LATIN = "\u017f"
"""Last character with a glyph in pdflatex's T1 fonts; later ones would fail.

Letters from U+0100 on need ``\\usepackage[T1]{fontenc}``."""


@dataclass(frozen=True)
class Cell:
    """Contents of a table cell."""

    text: str
    note: str = ""
    """Smaller text beside or below, such as an interval."""
    tone: Literal["", "yes", "no"] = ""
    """Whether the text reports success or failure."""
    shares: Mapping[str, float] | None = None
    """Drawn as a bar: shares of `BAR_ACTIVITIES`."""
    hint: str = ""
    """Tooltip on a page."""
    sort_key: float | str | None = None
    """Sort key on a page."""
    links: Sequence[tuple[str, str]] = ()
    """Texts with link targets, which replace the text on a page."""


@dataclass(frozen=True)
class Column:
    """Heading and cell type of a column."""

    heading: str
    kind: Literal["name", "text", "number"] = "text"
    """Numbers are aligned on the right."""
    shown_on: Literal["", "wide", "page"] = ""
    """Where the column is shown: everywhere, on the page and on terminals from `WIDE` on, or on the page alone."""


@dataclass(frozen=True)
class Section:
    """A table with title and note."""

    title: str
    note: str
    """Explanation of the metrics, for the page."""
    terminal_note: str
    """A shorter explanation for the terminal: a phrase without a full stop."""
    columns: tuple[Column, ...]
    rows: list[list[Cell]]
    max_printed_rows: int = 1000
    """Maximum number of rows on the terminal; a negative number selects the last rows."""
    sortable: bool = False
    """Whether a click on a heading of the page sorts the rows."""
    omitted_rows: int = 0
    """Number of rows omitted everywhere."""
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
        """Yield the segments of something to be printed."""
        for text, style, control in super().render(renderable, options):
            if not control and not text.isprintable():
                # An escape has at most 8 characters, so nothing is cut.
                text = escape_control(text, max_characters=8 * len(text))
            yield Segment(text, style, control)

    def on_broken_pipe(self) -> None:
        """Leave the error to the command line; rich would exit with status 1, the status of a failed run."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def draw_section(section: Section, width: int) -> Group:
    """Render a section for a terminal of this width.

    In a table too wide for the terminal, notes of numbers move below their numbers, and cells are wrapped.
    """
    rows = _printed_rows(section)
    # Where the last rows are shown, those left out everywhere are earlier ones as well (`thinning.shortened`).
    before = " before them" if section.max_printed_rows < 0 else ""
    table = _fitted_table(section, rows, width)
    parts: list[RenderableType] = [table]
    hidden = {
        "the report": len(section.rows) - len(rows),
        section.complete_file: section.omitted_rows,
    }
    notes = []
    for place, count in hidden.items():
        if count:
            notes.append(f"{count:,} more{before} in {place}")
    if notes:
        parts.append(Text(f"  and {', '.join(notes)}", style="dim"))
    if not section.title:
        return Group(*parts)
    # Outside the table, since rich wraps a table's own title at the width of the table.
    gap = "  " if len(section.title) + len(section.terminal_note) < width - 3 else "\n "
    title = Text(f" {section.title}", style="bold").append(
        f"{gap}{section.terminal_note}", style="not bold dim"
    )
    return Group(title, *parts, Text())


def _printed_rows(section: Section) -> Sequence[Sequence[Cell]]:
    """Return the rows for the terminal: the first ones, or the last ones if their maximum number is negative."""
    if section.max_printed_rows < 0:
        return section.rows[section.max_printed_rows :]
    return section.rows[: section.max_printed_rows]


_RULER = Console(width=100_000)
"""A console that prints nothing: it measures how wide tables are without wrapping, and lays them out at a width."""


def split_wide(section: Section, row_heading: str, width: int) -> list[Section]:
    """Divide a table too wide for the terminal into several tables, in which no word is torn.

    The tables have the same rows, numbered under ``row_heading``: first the columns of kind ``name``, as a legend of
    the numbers, then the other columns. A table that fits is returned as it is.
    """
    if _fits(section, width):
        return [section]
    names = []
    others = []
    for place, column in enumerate(section.columns):
        if column.kind == "name":
            names.append(place)
        else:
            others.append(place)
    parts = []
    for places in (names, others):
        if places:
            parts += _split_columns(section, places, row_heading, width)
    # The title stands above the first table, and belongs to all of them.
    untitled = [replace(part, title="", terminal_note="") for part in parts[1:]]
    return [parts[0], *untitled]


def _split_columns(
    section: Section, places: Sequence[int], row_heading: str, width: int
) -> list[Section]:
    """Return the columns at these places as one table with numbered rows, or as several if one is too wide."""
    rows = []
    for number, row in enumerate(section.rows, 1):
        rows.append([Cell(str(number)), *(row[place] for place in places)])
    columns = [Column(row_heading, "name")]
    columns += [section.columns[place] for place in places]
    part = replace(section, columns=tuple(columns), rows=rows)
    if len(places) == 1 or _fits(part, width):
        return [part]
    half = (len(places) + 1) // 2
    first = _split_columns(section, places[:half], row_heading, width)
    return first + _split_columns(section, places[half:], row_heading, width)


def _fits(section: Section, width: int) -> bool:
    """Whether a section can be drawn at this width without a torn word.

    Rich tears words rather than refuse a table, and says nothing, so the drawn words are compared with those of the
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
    """Return the rows as a table, which is narrow if the usual form is wider than the terminal."""
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
        cells = [_cell_text(row[place], column, separator) for place, column in shown]
        table.add_row(*cells)
    return table


def _is_shown(column: Column, width: int) -> bool:
    """Whether a column is shown on a terminal of this width."""
    return not column.shown_on or (column.shown_on == "wide" and width >= WIDE)


def _cell_text(cell: Cell, column: Column, separator: str) -> Text:
    """Render a cell; ``separator`` stands between a number and its note."""
    if cell.text == formats.NONE and column.kind == "number":
        return Text(cell.text, style="dim")
    text = Text(cell.text, style=TONES[cell.tone])
    if cell.shares is not None:
        text = _time_bar(cell.shares)
    # Optional columns are the least important: the terminal leaves out their notes.
    if cell.note and not column.shown_on:
        before = separator if column.kind == "number" else "\n"
        text.append(before + cell.note, style="dim")
    return text


def _time_bar(shares: Mapping[str, float]) -> Text:
    """Draw the activities of a device as a bar; the remainder is idle time."""
    text = Text()
    # Length of the bar so far: drawn in whole characters, and exactly.
    drawn = 0
    end = 0.0
    for kind, style in zip(BAR_ACTIVITIES, ("blue", "yellow", "red"), strict=True):
        # Rounded ends rather than rounded lengths, whose sum could exceed the bar.
        end += shares[kind] * BAR_LENGTH
        cells = min(BAR_LENGTH, round(end)) - drawn
        text.append("█" * cells, style=style)
        drawn += cells
    return text.append("░" * (BAR_LENGTH - drawn), style="dim")


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
    for place, column in enumerate(section.columns):
        if column.shown_on != "page":
            shown.append((place, column))
    alignments = ""
    headings = []
    for _, column in shown:
        alignments += "r" if column.kind == "number" else "l"
        headings.append(column.heading)
    lines = [rf"\begin{{tabular}}{{{alignments}}}", r"\toprule"]
    lines += [_latex_row(headings), r"\midrule"]
    for row in section.rows:
        lines.append(_latex_row([_text_and_note(row[place]) for place, _ in shown]))
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
    for sign in text.translate(LATEX):
        is_latin = sign.isalpha() and sign <= LAST_LATIN
        # Not left out, which could change a value or make two labels equal.
        escaped += sign if sign.isascii() or is_latin else "?"
    return escaped.strip()
