"""The HTML report of a run: one file without outside resources, in the reader's colour scheme."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import zip_longest
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from testbed.common.errors import InputError
from testbed.common.lazy import require_extra
from testbed.common.yamltext import written
from testbed.scenario.points import value_text
from testbed_controller.report.charts import (
    FEW,
    STYLES,
    Axis,
    Chart,
    DeviceMap,
    Line,
    LinePlot,
    Ownership,
    Points,
    StackedPlot,
    Window,
)
from testbed_controller.report.declared import Drawn, curves, head
from testbed_controller.report.sections import directions, expected, holdings, sections
from testbed_controller.report.tables import Section
from testbed_controller.report.terminal import VERDICTS
from testbed_controller.report.thinning import abridged, devices_shown
from testbed_controller.report.timeline import shaded, timeline
from testbed_controller.results.recorder import facts_of
from testbed_controller.results.run import Run

EXPLAINED = {
    "trusted": "Everything that bears on the timings was as the scenario asks for.",
    "not trusted": "The timings of this run should not be relied on:",
    "prediction": "Simulated: computed from the scenario's values on a virtual clock, without measurements.",
}


@cache
def environment() -> Environment:
    """Return the templates, with escaping always on and every missing name an error."""
    return Environment(
        loader=PackageLoader("testbed_controller.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page(
    title: str,
    *,
    chips: Sequence[str],
    sections: Sequence[Section],
    charts: Sequence[Chart],
    files: Sequence[str] = (),
    runs: Sequence[Run] = (),
    lead: str = "",
    warnings: Sequence[str] = (),
    notice: str = "",
    first: Section | None = None,
) -> str:
    """Return a page about several runs.

    ``charts`` are (title, note, plot), saved as ``files`` if they are; the section ``first`` stands before them.
    """
    origin = (
        {
            "version": runs[0].manifest["versions"]["testbed"],
            "date": max(run.manifest["date"] for run in runs),
        }
        if runs
        else {}
    )
    kinds = sorted({f"{run.outcome.runtime}d" for run in runs})
    return (
        environment()
        .get_template("runs.html")
        .render(
            title=title,
            lead=lead,
            chips=[*chips, *kinds],
            warnings=warnings,
            notice=notice,
            first=first,
            charts=list(zip_longest(draw_charts(charts), files)),
            sections=sections,
            **origin,
        )
    )


def draw_charts(charts: Sequence[Chart]) -> list[tuple[str, str, Markup | None]]:
    """Return charts with their plots as SVG; where matplotlib is not installed, one note in place of all."""
    if not charts:
        return []
    try:
        require_extra("matplotlib", "plots", "drawing charts")
    except InputError as error:
        return [("Charts", str(error), None)]
    from testbed_controller.report.drawing import inline

    return [
        (title, note, None if plot is None else inline(plot, title))
        for title, note, plot in charts
    ]


def write(run: Run) -> None:
    """Write ``report.html`` into the folder of the run."""
    (run.path / "report.html").write_text(render(run), encoding="utf-8")


def render(run: Run) -> str:
    """Return the report of a run as HTML."""
    metrics, scenario = run.metrics, run.trial.scenario
    return (
        environment()
        .get_template("report.html")
        .render(
            title=scenario.name,
            scenario=scenario,
            chips=list(_summary_chips(run)),
            verdict=metrics["verdict"],
            sign=VERDICTS[metrics["verdict"]["kind"]][0],
            explained=_explain_verdict(metrics["verdict"]),
            figures=list(head(run)),
            expected=expected(run),
            charts=draw_charts(list(charts(run))),
            timeline=timeline(run),
            sections=list(sections(run)),
            fell=any(row["down"] for row in metrics["devices"].values()),
            directions=directions(run),
            reproduce=_reproduce_command(run),
            scenario_text=written(abridged(facts_of(run.trial), "scenario.yaml")),
            plan_text=json.dumps(
                abridged(run.plan.model_dump(mode="json"), "plan.json"), indent=2
            ),
            manifest=list(
                _flatten_facts(
                    {
                        key: value
                        for key, value in run.manifest.items()
                        if key != "owned"
                    }
                )
            ),
            version=run.manifest["versions"]["testbed"],
            date=run.manifest["date"],
        )
    )


def _summary_chips(run: Run) -> Iterator[str]:
    workload = run.trial.scenario.workload
    yield "emulated in containers" if run.outcome.runtime == "emulate" else "simulated"
    if not workload.is_computed:
        yield "timing only, without computation"
    yield from workload.labels()
    count = len(run.experiment.devices)
    yield f"{count} device{'' if count == 1 else 's'}"
    yield f"seed {run.trial.scenario.seed}"
    for key, value in run.trial.point.items():
        yield f"{key} = {value_text(value)}"
    if run.trial.repetition:
        yield f"repetition {run.trial.repetition + 1}"


def _explain_verdict(judged: Mapping[str, Any]) -> str:
    text = EXPLAINED[judged["kind"]]
    return f"{text} {'; '.join(judged['reasons'])}." if judged["reasons"] else text


def charts(run: Run) -> Iterator[Chart]:
    """Yield title, note and plot of each chart of a run."""
    series = run.metrics["series"]
    steps, evaluations, requests = (
        series["steps"],
        series["evaluations"],
        series["requests"],
    )
    windows = [Window(**window) for window in shaded(run)]
    explained = " Shaded: faults, recoveries and pauses." if windows else ""
    draw = partial(LinePlot, windows=windows, range_=(0.0, run.metrics["duration"]))
    if steps:
        tested = Line(
            "test loss", _series_points(evaluations, "loss"), "violet", marks=True
        )
        lines = [Line("training loss", _series_points(steps, "loss"), "blue"), tested]
        yield (
            "Loss",
            f"Of every training step, and on the test data.{explained}",
            draw(lines, y=Axis("loss")),
        )
    # The one evaluation at the end of a run is a figure, not a curve.
    if len(evaluations) > 1:
        lines = [
            Line(
                "test accuracy",
                _series_points(evaluations, "accuracy"),
                "green",
                marks=True,
            )
        ]
        yield "Accuracy", "On the test data.", draw(lines, y=Axis("accuracy", "share"))
    if steps:
        steady, others = (
            [row for row in steps if row["steady"] == is_steady]
            for is_steady in (True, False)
        )
        lines = [
            Line(
                "undisturbed", _series_points(steady, "seconds"), "blue", joined=False
            ),
            Line(
                "disturbed", _series_points(others, "seconds"), "orange", joined=False
            ),
        ]
        note = "Since the step before. Disturbed: the first step, and steps with an evaluation, fault or recovery."
        yield "Time per step", note, draw(lines, y=Axis("time per step", "seconds"))
    if requests:
        lines = [
            Line("latency", _series_points(requests, "latency"), "blue", joined=False)
        ]
        yield (
            "Latency",
            f"Of every request.{explained}",
            draw(lines, y=Axis("latency", "seconds")),
        )
    for curve in curves(run):
        yield _own_chart(curve, draw, run.metrics["duration"])
    if run.experiment.radio is not None:
        yield _device_map(run)
    yield from _ownership_charts(run)


def _series_points(rows: Sequence[Mapping[str, Any]], key: str) -> Points:
    """Return the values of a key over time, skipping rows without one."""
    return [(row["time"], row[key]) for row in rows if row.get(key) is not None]


def _device_map(run: Run) -> Chart:
    """Draw device positions, reception between devices, and model pieces."""
    part, radio = run.trial.scenario.network.radio, run.experiment.radio
    assert part is not None
    assert radio is not None
    ratios = {
        pair: 1 - link.message_loss for pair, link in run.experiment.links.items()
    }
    plot = DeviceMap(radio.positions, ratios, holdings(run), part.area)
    note = "The half of a line at a device is which share of its casts the other receives (PRR), before any fault."
    return "Map", note, plot


def _ownership_charts(run: Run) -> Iterator[Chart]:
    """Draw the data ownership of the devices shown in the table."""
    owned = run.manifest.get("owned", {})
    shown = {
        name: owned[name]
        for name in devices_shown(run.metrics["devices"])
        if name in owned
    }
    if not shown:
        return
    most = max(count for each in shown.values() for count in each.values())
    note = f"Training samples of each device by class: the largest disc is {most:,} samples, areas in proportion."
    order = "the scenario"
    if left_out := len(owned) - len(shown):
        note += f" {left_out:,} more devices are left out here; manifest.json has all."
        order = "the table of devices"
    yield "Who owns what", note, Ownership(shown, order)


def _own_chart(curve: Drawn, draw: Callable[..., LinePlot], end: float) -> Chart:
    """Draw a chart defined by the method, limited to as many lines as there are colours."""
    lines = [
        Line(name or curve.title, points, *style, marks=len(points) <= FEW)
        for (name, points), style in zip(curve.lines, STYLES, strict=False)
    ]
    left_out = len(curve.lines) - len(lines)
    note = (
        f"{curve.note} {left_out} more are in metrics.json." if left_out else curve.note
    )
    y = Axis(curve.title[0].lower() + curve.title[1:], curve.kind)
    plot = (
        StackedPlot(lines, curve.marks, end=end, y=y)
        if curve.stacked
        else draw(lines, y=y)
    )
    return curve.title, note, plot


def _reproduce_command(run: Run) -> str:
    revision = run.manifest["revision"]
    at = f"# testbed {run.manifest['versions']['testbed']}" + (
        f", revision {revision}" if revision else ""
    )
    again = shlex.join(
        [
            "testbed",
            "run",
            str(run.path / "scenario.yaml"),
            "--runtime",
            run.outcome.runtime,
        ]
    )
    return f"{at}\n{run.manifest['command']}\n# or, from the resolved scenario of this folder\n{again}"


def _flatten_facts(
    value: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of nested facts."""
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flatten_facts(item, f"{prefix}{key}.")
        elif item not in (None, "", []):
            yield f"{prefix}{key}", str(item)
