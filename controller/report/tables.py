"""Tables on the terminal, all in one style: no frame, a line under the head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from testbed.common.formats import visible

BETWEEN = 3
"""Letters between two columns."""


class VisibleConsole(Console):
    """Writes control characters out that are in what it prints: names and messages come from scenarios and devices."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of something to be printed."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control or text.isprintable() else visible(text, len(text) * 8), style, control)


def table(*columns: str, bold: Sequence[str] = (), right: Sequence[str] = ()) -> Table:
    """Return an empty table with these columns; those on the right hold figures, and are never wrapped."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="dim", padding=(0, 1), expand=False)
    for column in columns:
        made.add_column(
            column,
            style="bold" if column in bold else "",
            justify="right" if column in right else "left",
            no_wrap=column in right,
            overflow="fold",
        )
    return made


def blocks(widths: Sequence[int], room: int) -> list[list[int]]:
    """Return which columns stand side by side: as many as there is room for, at least one; the others go on below."""
    found: list[list[int]] = []
    for index, width in enumerate(widths):
        if not found or sum(widths[other] for other in found[-1]) + width > room:
            found.append([])
        found[-1].append(index)
    return found
