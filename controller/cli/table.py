"""Tables as commands print them."""

from __future__ import annotations

from collections.abc import Sequence

import click


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns as wide as they need to be, plain enough to cut up with awk."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
