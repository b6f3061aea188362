"""The format of ``figures.yaml``: the claims of a paper, and for each an expression that computes our value.

A row is one claim: a value that the paper prints. A `Value` is a metric of our runs at one point of a sweep, and an
expression combines values in the same way as the claim, such as a ratio of two times. `Figures` is the whole file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from testbed import InputError

FILE = "figures.yaml"
"""Name of the file in the folder of a paper."""
UNITS = {
    "": 1.0,
    "x": 1.0,
    "%": 0.01,
    "points": 0.01,
    "s": 1.0,
    "min": 60.0,
    "MB": 1e6,
    "MiB": 2.0**20,
}
"""Unit of a paper -> size of the unit in those of metrics: seconds, bytes, shares and plain numbers."""
REFERENCE = re.compile(
    r"\b(figures?|tables?|equations?|sections?|algorithms?|phases?)\s*\(?\d+\)?(\([a-z]\))?",
    re.I,
)
"""A reference such as ``Figure 9(a)``, whose number is not a value."""
PAPERS_NUMBER = re.compile(
    r"\b(theirs?|papers?('s)?|authors?('s)?|prints?|printed|says?)\b[^;.]*?\d"
)
"""A word for the paper, followed by a digit in the same clause: a number of the paper."""


class _Part(BaseModel):
    """Base class of the parts of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Value(_Part):
    """A metric of the runs at one point of a sweep."""

    metric: str = ""
    """Name of a metric as in `expect`, or ``plan.`` and a dotted key of the plan's details; default: the row's metric.
    """
    at: dict[str, Any] = {}
    """The point of the sweep, in addition to that of the row: values by swept key, or by a key inside a swept value."""
    scenario: str = ""
    """Default: the scenario of the row."""
    minimum: bool = False
    """Whether to take the minimum of several points of the sweep, instead of the value at one point."""
    key: str = ""
    """With `minimum`: a swept key, whose value at the point with the minimum replaces the metric."""


class Ratio(_Part):
    """The first value divided by the second; either may be another ratio, for example a speed-up."""

    ratio: tuple[Value | Ratio, Value | Ratio]


class Difference(_Part):
    """The first value minus the second."""

    difference: tuple[Value, Value]


class Saving(_Part):
    """The share by which the first value is below the second."""

    saving: tuple[Value, Value]


Expression = Value | Ratio | Difference | Saving


def operands(
    expression: Ratio | Difference | Saving,
) -> tuple[Value | Ratio, Value | Ratio]:
    """Return the two expressions combined by a ratio, a difference or a saving."""
    match expression:
        case Ratio(ratio=pair) | Difference(difference=pair) | Saving(saving=pair):
            return pair


def terms(expression: Expression) -> tuple[Value, ...]:
    """Return all values in an expression, in order.

    >>> duration = Value(metric="duration")
    >>> terms(Ratio(ratio=(duration, duration))) == (duration, duration)
    True
    """
    if isinstance(expression, Value):
        return (expression,)
    first, second = operands(expression)
    return (*terms(first), *terms(second))


def complete_expression(
    expression: Expression, metric: str, at: dict[str, Any]
) -> Expression:
    """Return an expression whose values have the metric and the point of the sweep that the row states for all values.

    >>> complete_expression(Value(at={"devices": 2}), "duration", {"seed": 1})
    Value(metric='duration', at={'seed': 1, 'devices': 2}, scenario='', minimum=False, key='')
    """
    if isinstance(expression, Value):
        # Metric and keys of the value take precedence over those of the row.
        point = {**at, **expression.at}
        update = {"metric": expression.metric or metric, "at": point}
        return expression.model_copy(update=update)
    first, second = operands(expression)
    completed = (
        complete_expression(first, metric, at),
        complete_expression(second, metric, at),
    )
    # The name of the only field: ratio, difference or saving.
    (field_name,) = type(expression).model_fields
    return expression.model_copy(update={field_name: completed})


class Row(_Part):
    """One claim of a paper, for example a value in a figure or a table."""

    item: str
    """The figure, table or section of the paper with the claim."""
    name: str
    """Name of the row, unique in the file."""
    kind: Literal["arithmetic", "measured", "ranking"]
    """``arithmetic`` follows from formulas and must be equal; ``measured`` was measured by the authors; ``ranking``
    compares two values."""
    paper: str | tuple[str | None, str | None]
    """The paper's value with all printed digits, or the two ends of a range (null: open).

    For a ranking ``larger``, if the first value of the expression is the larger one, or ``similar``.
    """
    unit: str = ""
    """A key of `UNITS`."""
    scenario: str
    metric: str = ""
    """The metric of all values in `ours` that name none."""
    at: dict[str, Any] = {}
    """The point of the sweep, by swept key, for all values in `ours`."""
    each: dict[str, tuple[Any, ...]] = {}
    """Several values of swept keys: each combination gives one expression, and our value is the range of all."""
    ours: Expression | tuple[Expression, ...] = Value()
    """The expression that computes our value; several give a range from the smallest to the largest value."""
    largest: bool = False
    """Whether the paper states a maximum ("up to"), so that our value is the upper end of our range alone."""
    fitted: str = ""
    """The parameter that was set from this figure or a neighbouring one; empty without such a parameter."""
    data: str = ""
    """The data of our runs if the paper used other data; empty for the paper's data."""
    other_metric: str = ""
    """Our metric, if our runs lack the metric of the paper; empty for the paper's metric."""
    note: str = ""
    """A remark for readers."""

    @property
    def ends(self) -> tuple[str, ...]:
        """The paper's value, or the ends of a range except open ones."""
        if isinstance(self.paper, tuple):
            return tuple(filter(None, self.paper))
        return (self.paper,)

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """All expressions of the row, completed with the metric and the points stated once by the row."""
        incomplete = self.ours if isinstance(self.ours, tuple) else (self.ours,)
        expressions = []
        for values in product(*self.each.values()):
            combination = dict(zip(self.each, values, strict=True))
            at = {**self.at, **combination}
            for expression in incomplete:
                expressions.append(complete_expression(expression, self.metric, at))
        return tuple(expressions)

    @field_validator("unit")
    @classmethod
    def _check_unit(cls, unit: str) -> str:
        if unit not in UNITS:
            raise ValueError(f"unknown unit '{unit}'; available: {', '.join(UNITS)}")
        return unit

    @field_validator("note")
    @classmethod
    def _check_note(cls, note: str) -> str:
        # A number of the paper in a note would not be compared with ours.
        if PAPERS_NUMBER.search(REFERENCE.sub("", note)):
            raise ValueError(
                "a number of the paper must be a row, so that it is compared; remove it from the note"
            )
        return note

    @model_validator(mode="after")
    def _check(self) -> Row:
        is_ranking = self.kind == "ranking"
        if is_ranking != (self.paper in ("larger", "similar")):
            raise ValueError(
                "'paper' must be 'larger' or 'similar' in a row of the kind 'ranking', and a number in other rows"
            )
        if is_ranking:
            self._check_ranking()
        else:
            self._check_numbers()
        _check_metrics(self.expressions)
        return self

    def _check_ranking(self) -> None:
        for expression in self.expressions:
            if isinstance(expression, Value):
                raise ValueError(
                    "'ours' of a ranking must be a ratio or a difference of two values"
                )

    def _check_numbers(self) -> None:
        for end in self.ends:
            # Raises ValueError for text that is not a number.
            float(end)


def _check_metrics(expressions: tuple[Expression, ...]) -> None:
    for expression in expressions:
        for value in terms(expression):
            if not value.metric:
                raise ValueError(
                    "a value needs a metric; name it in the value or its row"
                )


class Condition(_Part):
    """A condition of our runs for all rows of a paper, chosen before the runs."""

    condition: str
    reason: str = ""


class ParameterValue(_Part):
    """One value of a parameter in a sensitivity test, and the expression for the row's claim with the value."""

    value: str
    """The value as text."""
    scenario: str
    at: dict[str, Any] = {}
    """The point of the sweep, by swept key, for all values in the expression."""
    ours: Expression | None = None
    """Default: the expression of the row."""
    unit: str = ""
    """Default: the unit of the row."""

    def expressions(self, row: Row) -> tuple[Expression, ...]:
        """Return the complete expressions for the claim of a row.

        >>> row = Row(item="", name="", kind="measured", paper="1", scenario="", metric="duration")
        >>> ParameterValue(value="two", scenario="", at={"devices": 2}).expressions(row)
        (Value(metric='duration', at={'devices': 2}, scenario='', minimum=False, key=''),)
        """
        incomplete = (self.ours,) if self.ours else row.expressions
        return tuple(
            complete_expression(each, row.metric, self.at) for each in incomplete
        )


class Sensitivity(_Part):
    """Our values of a row with other values of one parameter."""

    row: str
    parameter: str
    values: tuple[ParameterValue, ...]


class Headline(_Part):
    """A claim of an abstract or a conclusion, for the page of all papers."""

    claim: str
    rows: tuple[str, ...] = Field(min_length=1)
    """Names of the rows with the values of the claim."""
    differs: str = ""
    """The condition in which our runs differ from the paper's."""


class Series(_Part):
    """One line of a plot: a row for each position on the x axis."""

    label: str
    rows: tuple[str, ...]


class Plot(_Part):
    """Rows of a figure, drawn beside the paper's values."""

    title: str
    x: tuple[float | str, ...]
    axis: str = ""
    series: tuple[Series, ...]

    @property
    def file_name(self) -> str:
        """The name of the plot's file.

        >>> Plot(title="Time of an epoch, VGG5", x=(), series=()).file_name
        'time-of-an-epoch-vgg5.svg'
        """
        words = re.sub("[^a-z0-9]+", "-", self.title.lower())
        return words.strip("-") + ".svg"


class Containers(_Part):
    """A short figure for the comparison of both clocks, run in containers and simulated."""

    figure: str
    """The figure of the paper, and the part of it that is run."""
    scenario: str
    changes: dict[str, Any] = {}
    """Dotted keys and values that make the scenario one short run."""
    metrics: tuple[str, ...] = Field(min_length=1)
    """Metrics whose ratio is shown."""


class Figures(_Part):
    """The content of ``figures.yaml``: the claims of one paper, with the scenarios and expressions of our values."""

    paper: str
    conditions: tuple[Condition, ...]
    changes: dict[str, dict[str, Any]] = {}
    """Scenario -> changes of its keys for the comparison, by dotted key."""
    rows: tuple[Row, ...]
    sensitivity: tuple[Sensitivity, ...] = ()
    plots: tuple[Plot, ...] = ()
    headlines: tuple[Headline, ...] = ()
    containers: Containers | None = None

    @model_validator(mode="after")
    def _check(self) -> Figures:
        counts = Counter(row.name for row in self.rows)
        repeated = []
        for name, count in sorted(counts.items()):
            if count > 1:
                repeated.append(name)
        # Headlines, plots and sensitivity refer to rows by name.
        if repeated:
            raise ValueError(f"each row needs a name of its own: {', '.join(repeated)}")
        unknown = sorted(self._referenced_rows() - counts.keys())
        if unknown:
            raise ValueError(f"unknown rows: {', '.join(unknown)}")
        for sensitivity in self.sensitivity:
            row = self.row(sensitivity.row)
            for value in sensitivity.values:
                _check_metrics(value.expressions(row))
        return self

    def _referenced_rows(self) -> set[str]:
        """Return the names of rows used by headlines, plots and sensitivity."""
        names: set[str] = set()
        for headline in self.headlines:
            names.update(headline.rows)
        for plot in self.plots:
            for series in plot.series:
                names.update(series.rows)
        for each in self.sensitivity:
            names.add(each.row)
        return names

    def row(self, name: str) -> Row:
        """Return a row by name."""
        return next(row for row in self.rows if row.name == name)

    def values(self) -> Iterator[tuple[str, Value]]:
        """Yield all values of rows and sensitivity, each with the name of the scenario."""
        for row in self.rows:
            for expression in row.expressions:
                yield from _terms_with_scenario(expression, row.scenario)
        for sensitivity in self.sensitivity:
            row = self.row(sensitivity.row)
            for value in sensitivity.values:
                for expression in value.expressions(row):
                    yield from _terms_with_scenario(expression, value.scenario)


def _terms_with_scenario(
    expression: Expression, default_scenario: str
) -> Iterator[tuple[str, Value]]:
    for term in terms(expression):
        yield term.scenario or default_scenario, term


def load(folder: Path) -> Figures:
    """Read ``figures.yaml`` of a system's folder; raises `InputError` for a missing or invalid file.

    >>> load(Path("papers/pipelearn")).paper
    'PipeLearn'
    """
    file = folder / FILE
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        return Figures.model_validate(content)
    except FileNotFoundError:
        raise InputError(
            f"{file}: not found; papers are compared in a checkout of the testbed"
        ) from None
    except ValidationError as error:
        # All problems at once, since the file is written by hand.
        problems = []
        for each in error.errors():
            key = ".".join(map(str, each["loc"]))
            problems.append(f"{file}: {key}: {each['msg']}")
        raise InputError("\n".join(problems)) from None
