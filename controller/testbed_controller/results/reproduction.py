"""A publication's figures beside ours: one row each, with the ratio of the two and the spread over repetitions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from testbed.common import formats
from testbed.common.conditions import parse_condition
from testbed.common.formats import FigureKind
from testbed.scenario.expect import look_up
from testbed.scenario.paper import PLAN, is_at, paper_value, row_kind
from testbed.scenario.points import point_text
from testbed.scenario.schema import PaperPart, PaperRow
from testbed.trace.figures import Figure
from testbed_controller.results.run import Run
from testbed_controller.results.summary import CONFIDENCE, all_figures, interval, is_number

CLOSE = 0.05
"""By how much ours may differ, as a share of the paper's figure."""
POINTS = 0.03
"""By how much a share, such as an accuracy, may differ: three points."""
Outcome = Literal["reproduced", "reproduced under a stated reading", "not reproduced"]


@dataclass(frozen=True)
class ReproducedRow:
    """One figure of the publication and what came out here."""

    name: str
    measure: str
    """What is measured, in words."""
    kind: FigureKind
    """What both are measured in."""
    paper: float | None
    ours: float | None
    """Mean over the runs; None where none of them gave the figure."""
    half_width: float | None
    """Half width of the 95 % confidence interval of ``ours``; None for fewer than two runs."""
    runs: int
    untrusted: int
    """Runs whose verdict is against them."""
    condition: str | None
    holds: bool | None
    """Whether ``ours`` fulfils the condition; None without one."""
    note: str
    outcome: Outcome | None = None
    """None where the paper has no figure, or none came out here."""
    explains: str = ""
    """The row that does not come out and whose figure this is, with one thing changed."""
    where: str = ""
    """Which point it is, where it is the least of several."""
    claim: Literal["figure", "ranking"] = "figure"
    """What the paper claims: its figure, or a ranking alone."""
    formula: str = ""
    """By which formula the two differ, where no run explains why it does not come out."""

    @property
    def printed(self) -> str:
        """What the paper has, as tables show it."""
        if self.claim == "ranking" and self.paper is None:
            return "larger"
        return formats.of_kind(self.kind, self.paper)

    @property
    def remark(self) -> str:
        """What stands beside it."""
        by = f"by a formula: {self.formula}" if self.missed and self.formula else ""
        return "; ".join(filter(None, (self.where, by, self.note)))

    @property
    def missed(self) -> bool:
        """Whether the paper's figure does not come out."""
        return self.outcome == "not reproduced"

    @property
    def word(self) -> str:
        """What the table says of it: one of three words, or whether it explains why another row has the third."""
        if not self.explains or self.outcome is None:
            return self.outcome or ""
        return f"{'does not explain' if self.missed else 'explains'} {self.explains}"

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        return None if self.ours is None or not self.paper else self.ours / self.paper


def outcome(row: PaperRow, kind: FigureKind, paper: float | None, ours: float | None, reading: str) -> Outcome | None:
    """Return whether ours agrees with the paper's figure, within `CLOSE` of it or for shares within `POINTS`.

    A ranking agrees on the same side of zero or one. A ratio has to agree in both: 0.998 for 1.02 is within five
    percent, and yet the paper's gain is a loss. ``reading`` is the scenario's reading of open points of the paper.
    """
    if ours is None:
        return None
    even = 0 if row.minus is not None else 1
    if row.claim == "ranking":
        reproduced = (ours - even) * (1 if paper is None else paper - even) > 0
    elif paper is None:
        return None
    else:
        reproduced = abs(ours - paper) <= max(CLOSE * abs(paper), POINTS if kind == "share" else 0.0)
        is_ratio = row.over is not None or row.over_figure is not None
        reverses = is_ratio and (ours - even) * (paper - even) < 0
        reproduced = reproduced and not reverses
    if not reproduced:
        return "not reproduced"
    return "reproduced under a stated reading" if reading else "reproduced"


def reproduce(part: PaperPart, runs: Sequence[Run]) -> list[ReproducedRow]:
    """Return the table of a publication from all runs of its scenario."""
    figures = all_figures(runs)
    return [_row(row, runs, figures, part.reading) for row in part.rows]


def _row(row: PaperRow, runs: Sequence[Run], figures: Mapping[str, Figure], reading: str) -> ReproducedRow:
    chosen = [run for run in runs if is_at(run.trial.point, row.at)]
    where = ""
    if row.least:
        chosen, where = _least(chosen, row)
    other = row.minus if row.over is None else row.over
    below = chosen if other is None else [run for run in runs if is_at(run.trial.point, other)]
    pairs = _paired(chosen, below)
    values = []
    for over, under in pairs:
        value = figure(over, row.figure)
        if row.over is not None or row.over_figure is not None:
            divisor = figure(under, row.over_figure or row.figure)
            value = value / divisor if value is not None and divisor else None
        elif row.minus is not None:
            less = figure(under, row.figure)
            value = None if value is None or less is None else value - less
        if value is not None:
            values.append(value)
    mean, half = interval(values) if values else (None, None)
    kind = row_kind(row, figures)
    condition = None if row.expect is None else parse_condition(row.expect, kind)
    # A number is compared with a number, though the figure be a time: both are in base units.
    holds = None if condition is None else condition.holds(mean)
    used = {run.path: run for pair in pairs for run in pair}.values()
    untrusted = sum(run.metrics["verdict"]["kind"] == "not trusted" for run in used)
    paper = paper_value(row, kind)
    return ReproducedRow(
        row.name,
        _measure(row),
        kind,
        paper,
        mean,
        half,
        len(values),
        untrusted,
        row.expect,
        holds,
        row.note,
        outcome(row, kind, paper, mean, reading),
        row.explains,
        where,
        row.claim,
        row.formula,
    )


def _measure(row: PaperRow) -> str:
    """Say what a row measures: its figure, or of which figures it is the ratio."""
    name, under = (each.rpartition(".")[2].replace("_", " ") for each in (row.figure, row.over_figure or row.figure))
    if row.over_figure is not None and name != under:
        return f"{name} / {under}"
    if row.minus is not None:
        return f"difference of {name}"
    return name if row.over is None else f"ratio of {name}"


def _least(runs: Sequence[Run], row: PaperRow) -> tuple[list[Run], str]:
    """Return the runs of the point where a row's figure is least, and what that point has which the row leaves open."""
    points: dict[str, list[Run]] = {}
    for run in runs:
        points.setdefault(json.dumps(run.trial.point, sort_keys=True), []).append(run)
    means = [
        (fmean(values), place)
        for place, group in points.items()
        if (values := [value for run in group if (value := figure(run, row.figure)) is not None])
    ]
    if not means:
        return [], ""
    found = points[min(means, key=lambda each: each[0])[1]]
    left = {key: value for key, value in found[0].trial.point.items() if key not in row.at}
    return found, f"least at {point_text(left)}"


def _paired(chosen: Sequence[Run], below: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Pair runs of the same repetition: they share their seed, so what they have in common cancels."""
    found = {run.trial.repetition: run for run in below}
    return [(run, found[run.trial.repetition]) for run in chosen if run.trial.repetition in found]


def figure(run: Run, name: str) -> float | None:
    """Return a figure of a run's metrics, or of its plan's details; None where there is none."""
    value = look_up(
        run.plan.details.model_dump(mode="json") if name.startswith(PLAN) else run.metrics, name.removeprefix(PLAN)
    )
    return float(value) if is_number(value) else None


def table(rows: Sequence[ReproducedRow]) -> list[str]:
    """Return the lines of the table in Markdown."""
    lines = ["| | paper | ours | ± | ratio | runs | | note |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [row.printed, *(formats.of_kind(row.kind, value) for value in (row.ours, row.half_width))]
        ratio = "–" if row.ratio is None else f"{row.ratio:.3g}"
        lines.append(f"| {' | '.join([row.name, *cells, ratio, str(row.runs), row.word, row.remark])} |")
    return lines


def write(folder: Path, part: PaperPart, rows: Sequence[ReproducedRow]) -> None:
    """Write ``paper.json`` into the folder of the runs."""
    document = {
        "source": part.source,
        "reading": part.reading,
        "confidence": CONFIDENCE,
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
    }
    (folder / "paper.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
