"""Tables as plain data, rendered on a terminal and in LaTeX; pages use a template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from testbed.common import formats
from testbed.common.formats import escape_control

BARS = ("compute", "communicate", "down")
"""Activities drawn in the time bar of a device."""
BAR = 16
"""Length of a time bar in characters."""
WIDE = 100
"""Minimum terminal width for optional columns."""
WHOLE = 18
"""Maximum length of names that are never wrapped, to save space for values."""
TONES = {"": "", "yes": "green", "no": "red"}
LATEX = str.maketrans(
    {sign: rf"\{sign}" for sign in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\n": " ",
    }
    | {
        "±": r"$\pm$",
        "×": r"$\times$",
        "→": r"$\to$",
        "↔": r"$\leftrightarrow$",
        "µ": r"\textmu{}",
        "–": "--",
    }
    | {
        "✔": "yes",
        "✘": "no",
        "≥": r"$\geq$",
        "≤": r"$\leq$",
        "\u00a0": "~",
        "…": r"\ldots{}",
    }
)
LAST_LATIN = "\u017f"
"""Last character with a glyph in pdflatex's T1 fonts; later ones would fail."""


@dataclass(frozen=True)
class Cell:
    """Contents of a table cell."""

    text: str
    note: str = ""
    """Smaller text beside or below."""
    tone: Literal["", "yes", "no"] = ""
    """Whether the text reports success or failure."""
    shares: Mapping[str, float] | None = None
    """Drawn as a bar: shares of `BARS`."""
    hint: str = ""
    """Tooltip on a page."""
    order: float | str | None = None
    """Sort key on a page."""
    links: Sequence[tuple[str, str]] = ()
    """Texts with link targets, which replace the text on a page."""


@dataclass(frozen=True)
class Column:
    """Heading and cell type of a column."""

    heading: str
    kind: Literal["name", "text", "figure"] = "text"
    """Figures are aligned on the right."""
    where: Literal["", "wide", "page"] = ""
    """Shown only on wide terminals and on the page, or on the page alone."""


@dataclass(frozen=True)
class Section:
    """A table with title and note."""

    title: str
    note: str
    """Explanation of the metrics, for the page."""
    brief: str
    """The same for the terminal, half a sentence."""
    columns: tuple[Column, ...]
    rows: list[list[Cell]]
    most: int = 1000
    """Maximum number of rows on the terminal; a negative number selects the last rows."""
    sortable: bool = False
    """Whether a click on a heading of the page sorts the rows."""
    left_out: int = 0
    """Number of rows omitted everywhere."""
    all_in: str = "metrics.json"
    """File with all rows, relative to the page."""


def plain(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> Section:
    """Return a table of texts without a title."""
    return Section(
        "", "", "", tuple(columns), [[Cell(text) for text in row] for row in rows]
    )


def figures(
    *headings: str, where: Literal["", "wide", "page"] = ""
) -> tuple[Column, ...]:
    """Return columns of figures."""
    return tuple(Column(heading, "figure", where) for heading in headings)


class VisibleConsole(Console):
    """Console that escapes control characters, because names and messages come from scenarios and devices."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield the segments of something to be printed."""
        for text, style, control in super().render(renderable, options):
            yield Segment(
                text
                if control or text.isprintable()
                else escape_control(text, len(text) * 8),
                style,
                control,
            )


def draw(section: Section, width: int) -> Group:
    """Return a section for a terminal of a width: notes go below their cells, and cells are wrapped, as needed."""
    rows = (
        section.rows[section.most :]
        if section.most < 0
        else section.rows[: section.most]
    )
    table = _make_table(section, rows, width)
    if _RULER.measure(table).maximum > width:
        table = _make_table(section, rows, width, is_narrow=True)
    parts: list[RenderableType] = [table]
    before = " before them" if section.most < 0 else ""
    more = {
        "the report": len(section.rows) - len(rows),
        section.all_in: section.left_out,
    }
    if left := [
        f"{count:,} more{before} in {where}" for where, count in more.items() if count
    ]:
        parts.append(Text(f"  and {', '.join(left)}", style="dim"))
    if not section.title:
        return Group(*parts)
    # A table's own title would wrap at the width of the table.
    gap = "  " if len(section.title) + len(section.brief) < width - 3 else "\n "
    title = Text(f" {section.title}", style="bold").append(
        f"{gap}{section.brief}", style="not bold dim"
    )
    return Group(title, *parts, Text())


_RULER = Console(width=100_000)
"""Measures how wide tables are without wrapping."""


def _make_table(
    section: Section,
    rows: Sequence[Sequence[Cell]],
    width: int,
    *,
    is_narrow: bool = False,
) -> Table:
    """Return the rows as a table; in a narrow one, columns stand close and notes below their figures."""
    places = [
        place
        for place, column in enumerate(section.columns)
        if _is_shown(column, width)
    ]
    headed = any(section.columns[place].heading for place in places)
    apart = (0, 0 if is_narrow else 1)
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        header_style="dim",
        show_header=headed,
        padding=apart,
    )
    for place in places:
        column = section.columns[place]
        side: Literal["left", "right"] = "right" if column.kind == "figure" else "left"
        style = "bold" if column.kind == "name" else ""
        longest = max(
            len(text) for text in (column.heading, *(row[place].text for row in rows))
        )
        whole = column.kind == "name" and longest <= WHOLE
        table.add_column(
            column.heading, style=style, justify=side, overflow="fold", no_wrap=whole
        )
    for row in rows:
        table.add_row(
            *(
                _cell_text(
                    row[place], section.columns[place], "\n" if is_narrow else " "
                )
                for place in places
            )
        )
    return table


def _is_shown(column: Column, width: int) -> bool:
    """Whether a column is shown on a terminal of a width."""
    return not column.where or (column.where == "wide" and width >= WIDE)


def _cell_text(cell: Cell, column: Column, between: str) -> Text:
    if cell.text == formats.NONE and column.kind == "figure":
        return Text(cell.text, style="dim")
    text = (
        Text(cell.text, style=TONES[cell.tone])
        if cell.shares is None
        else _time_bar(cell.shares)
    )
    if (
        cell.note and not column.where
    ):  # columns that only wide terminals have say the least
        text.append(
            f"{between if column.kind == 'figure' else chr(10)}{cell.note}", style="dim"
        )
    return text


def _time_bar(shares: Mapping[str, float]) -> Text:
    """Draw the activities of a device as a bar; the remainder is idle time."""
    text = Text()
    left, filled = BAR, 0.0
    for kind, style in zip(BARS, ("blue", "yellow", "red"), strict=True):
        filled += shares[kind] * BAR
        cells = min(left, round(filled) - (BAR - left))
        text.append("█" * cells, style=style)
        left -= cells
    return text.append("░" * left, style="dim")


def latex(section: Section) -> str:
    """Return a section as a LaTeX table, which needs the package booktabs."""
    places = [
        place for place, column in enumerate(section.columns) if column.where != "page"
    ]
    heads = [section.columns[place].heading for place in places]
    rows = [
        [" ".join(filter(None, (row[place].text, row[place].note))) for place in places]
        for row in section.rows
    ]
    lines = [f"{' & '.join(map(_latex_text, row))} \\\\" for row in (heads, *rows)]
    kinds = "".join(
        "r" if section.columns[place].kind == "figure" else "l" for place in places
    )
    begin, end = rf"\begin{{tabular}}{{{kinds}}}", r"\end{tabular}"
    return "\n".join(
        [begin, r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule", end, ""]
    )


def _latex_text(text: str) -> str:
    """Escape a text for LaTeX, without characters unknown to pdflatex."""
    escaped = text.translate(LATEX)
    return "".join(
        sign
        for sign in escaped
        if sign.isascii() or (sign.isalpha() and sign <= LAST_LATIN)
    ).strip()
