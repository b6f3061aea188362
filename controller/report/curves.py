"""What runs went through as lines: of repetitions one, their mean, with the interval around it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from controller.report.plots import Line
from controller.results.run import Run
from controller.results.summary import interval

BAND = "Mean of the repetitions; pale band: 95% confidence interval."
MOST_PLACES = 200
"""At which a mean is taken: more than that are not told apart in a band."""
FEW = 60
"""Points of a line that can be told apart: each gets a mark."""

Points = list[tuple[float, float]]


def curve(
    run: Run, what: str, *, over: str = "steps", begin: float = 0.0, end: float = float("inf"), steady: bool = False
) -> Points:
    """Return (x, value) of a run's steps in their order: their time for `steps`, or what `PaperChart.what` names.

    ``over`` says whether x, from ``begin`` to ``end``, is the step or its seconds. A step that was done again is there
    as it was done last, so the outage is within the step resumed with. With ``steady``, only undisturbed steps.
    """
    table, key = {
        "steps": ("steps", "seconds"),
        "loss": ("steps", "loss"),
        "accuracy": ("evaluations", "accuracy"),
        "test_loss": ("evaluations", "loss"),
        "latency": ("requests", "latency"),
    }[what]
    rows = [row for row in run.metrics["series"][table] if row.get(key) is not None and (not steady or row["steady"])]
    last = {row.get("step", number): row for number, row in enumerate(rows)}
    x = "step" if over == "steps" else "time"
    return sorted((row[x], row[key]) for row in last.values() if begin <= row[x] <= end)


def mean_line(name: str, curves: Sequence[Points], colour: str) -> Line:
    """Return the mean of some curves over the x that all of them reach, with its 95% confidence interval (Student).

    Curves that do not stand at the same x are read in between, linearly. Those without a point do not count.
    """
    some = [points for points in curves if points]
    if len(some) < 2:
        points = some[0] if some else []
        return Line(name, points, colour, marks=len(points) <= FEW)
    low, high = max(points[0][0] for points in some), min(points[-1][0] for points in some)
    places = [x for x, _ in some[0] if low <= x <= high]
    places = places[:: -(-len(places) // MOST_PLACES)] if places else []
    means = [interval([_at(points, x) for points in some]) for x in places]
    points = [(x, mean) for x, (mean, _) in zip(places, means, strict=True)]
    return Line(name, points, colour, half_widths=[half for _, half in means])


def _at(points: Points, x: float) -> float:
    """Return the value of a curve at an x between its first and last."""
    after = bisect_left(points, (x, float("-inf")))
    (right, value) = points[after]
    if right == x:
        return value
    left, before = points[after - 1]
    return before + (value - before) * (x - left) / (right - left)
