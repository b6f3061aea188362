"""The HTML report of a run, and the common form of pages about several runs.

A page is one file without outside resources, in the reader's colour scheme (light or dark).
"""

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
    MAX_MARKED_POINTS,
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
from testbed_controller.report.declared import MethodChart, curves, summary_rows
from testbed_controller.report.sections import (
    directions_section,
    expectations_section,
    sections,
    units_of_devices,
)
from testbed_controller.report.tables import Section
from testbed_controller.report.terminal import VERDICT_SIGNS
from testbed_controller.report.thinning import abridge, notable_devices
from testbed_controller.report.timeline import shaded_windows, timeline
from testbed_controller.results.recorder import scenario_values
from testbed_controller.results.run import Run

VERDICT_TEXTS = {
    "trusted": "All conditions of the timings were as the scenario specifies.",
    "not trusted": "The timings of this run are not reliable:",
    "prediction": "Simulated: computed from the scenario's values on a virtual clock, without measurements.",
}
"""Explanation of each kind of verdict."""


@cache
def environment() -> Environment:
    """Return the loader of templates, which always escapes values and raises an error for an undefined name."""
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
    description: str = "",
    warnings: Sequence[str] = (),
    notice: str = "",
    top_section: Section | None = None,
) -> str:
    """Return a page about several runs as HTML.

    ``chips`` are short facts below the title. ``files`` are the paths of the charts' files without suffix, or empty.
    ``notice`` is a paragraph about the agreement of both runtimes. ``top_section`` is placed before the charts, and
    ``sections`` behind them.
    """
    footer = {}
    if runs:
        footer["version"] = runs[0].manifest["versions"]["testbed"]
        footer["date"] = max(run.manifest["date"] for run in runs)
    runtimes = sorted({f"{run.outcome.runtime}d" for run in runs})
    template = environment().get_template("runs.html")
    return template.render(
        title=title,
        description=description,
        chips=[*chips, *runtimes],
        warnings=warnings,
        notice=notice,
        top_section=top_section,
        charts=list(zip_longest(draw_charts(charts), files)),
        sections=sections,
        **footer,
    )


def draw_charts(charts: Sequence[Chart]) -> list[tuple[str, str, Markup | None]]:
    """Return (title, note, plot as SVG) of each chart. Without matplotlib, a single note replaces all charts."""
    if not charts:
        return []
    try:
        require_extra("matplotlib", "plots", "drawing charts")
    except InputError as error:
        return [("Charts", str(error), None)]
    from testbed_controller.report.drawing import inline

    drawn = []
    for title, note, plot in charts:
        drawn.append((title, note, None if plot is None else inline(plot, title)))
    return drawn


def write(run: Run) -> None:
    """Write ``report.html`` into the folder of the run."""
    (run.path / "report.html").write_text(render(run), encoding="utf-8")


def render(run: Run) -> str:
    """Return the report of a run as HTML."""
    metrics = run.metrics
    scenario = run.trial.scenario
    verdict = metrics["verdict"]
    sign, _ = VERDICT_SIGNS[verdict["kind"]]
    plan = abridge(run.plan.model_dump(mode="json"), "plan.json")
    manifest = dict(run.manifest)
    # The page shows the data of each device as a chart.
    manifest.pop("owned", None)
    template = environment().get_template("report.html")
    return template.render(
        title=scenario.name,
        scenario=scenario,
        chips=list(_summary_chips(run)),
        verdict=verdict,
        sign=sign,
        explained=_explain_verdict(verdict),
        headlines=list(summary_rows(run)),
        expectations=expectations_section(run),
        charts=draw_charts(list(charts(run))),
        timeline=timeline(run),
        sections=list(sections(run)),
        has_been_down=any(row["down"] for row in metrics["devices"].values()),
        directions=directions_section(run),
        reproduce=_reproduce_command(run),
        scenario_text=written(abridge(scenario_values(run.trial), "scenario.yaml")),
        plan_text=json.dumps(plan, indent=2),
        manifest=list(_flatten_values(manifest)),
        version=run.manifest["versions"]["testbed"],
        date=run.manifest["date"],
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
    # The swept values of this run, if it is part of a sweep.
    for key, value in run.trial.point.items():
        yield f"{key} = {value_text(value)}"
    if run.trial.repetition:
        yield f"repetition {run.trial.repetition + 1}"


def _explain_verdict(verdict: Mapping[str, Any]) -> str:
    text = VERDICT_TEXTS[verdict["kind"]]
    reasons = "; ".join(verdict["reasons"])
    return f"{text} {reasons}." if reasons else text


def charts(run: Run) -> Iterator[Chart]:
    """Yield the charts of a run."""
    series = run.metrics["series"]
    windows = [Window(**window) for window in shaded_windows(run)]
    shading = " Shaded: faults, recoveries and pauses." if windows else ""
    # All plots over time have the same windows and x axis.
    x_range = (0.0, run.metrics["duration"])
    make_plot = partial(LinePlot, windows=windows, x_range=x_range)
    if series["steps"]:
        lines = _loss_lines(series)
        note = f"Training loss of each step, and loss on the test data.{shading}"
        yield Chart("Loss", note, make_plot(lines, y=Axis("loss")))
    # A single evaluation at the end of a run is a value, not a curve.
    if len(series["evaluations"]) > 1:
        accuracies = _series_points(series["evaluations"], "accuracy")
        lines = [Line("test accuracy", accuracies, "green", mark_points=True)]
        plot = make_plot(lines, y=Axis("accuracy", "share"))
        yield Chart("Accuracy", "On the test data.", plot)
    if series["steps"]:
        lines = _step_time_lines(series["steps"])
        note = "Time since the previous step. Disturbed: the first, and those with an evaluation, fault or recovery."
        plot = make_plot(lines, y=Axis("time per step", "seconds"))
        yield Chart("Time per step", note, plot)
    if series["requests"]:
        latencies = _series_points(series["requests"], "latency")
        lines = [Line("latency", latencies, "blue", joined=False)]
        note = f"Of each request.{shading}"
        yield Chart("Latency", note, make_plot(lines, y=Axis("latency", "seconds")))
    for curve in curves(run):
        yield _method_chart(curve, make_plot, run.metrics["duration"])
    if run.experiment.radio is not None:
        yield _device_map(run)
    yield from _ownership_charts(run)


def _loss_lines(series: Mapping[str, Any]) -> list[Line]:
    training = _series_points(series["steps"], "loss")
    test = _series_points(series["evaluations"], "loss")
    return [
        Line("training loss", training, "blue"),
        Line("test loss", test, "violet", mark_points=True),
    ]


def _step_time_lines(steps: Sequence[Mapping[str, Any]]) -> list[Line]:
    undisturbed = []
    disturbed = []
    for row in steps:
        if row["steady"]:
            undisturbed.append(row)
        else:
            disturbed.append(row)
    times = _series_points(undisturbed, "seconds")
    disturbed_times = _series_points(disturbed, "seconds")
    # Points rather than joined lines, since a line between steps of one kind would cross steps of the other kind.
    return [
        Line("undisturbed", times, "blue", joined=False),
        Line("disturbed", disturbed_times, "orange", joined=False),
    ]


def _series_points(rows: Sequence[Mapping[str, Any]], key: str) -> Points:
    """Return the values of a key over time; rows without a value are skipped."""
    points = []
    for row in rows:
        value = row.get(key)
        if value is not None:
            points.append((row["time"], value))
    return points


def _device_map(run: Run) -> Chart:
    """Return a map of the device positions, with the reception between devices and their model units."""
    radio_part, radio = run.trial.scenario.network.radio, run.experiment.radio
    assert radio_part is not None
    assert radio is not None
    ratios = {}
    for pair, link in run.experiment.links.items():
        ratios[pair] = 1 - link.message_loss
    plot = DeviceMap(radio.positions, ratios, units_of_devices(run), radio_part.area)
    note = (
        "Packet reception ratio (PRR) before any fault. Each half of a line has the colour for the casts of the device "
        "at its end."
    )
    return Chart("Map", note, plot)


def _ownership_charts(run: Run) -> Iterator[Chart]:
    """Yield a chart of the training samples of the devices in the table of devices; nothing without owners."""
    owned = run.manifest.get("owned", {})
    drawn = {}
    for name in notable_devices(run.metrics["devices"]):
        if name in owned:
            drawn[name] = owned[name]
    if not drawn:
        return
    largest = max(max(counts.values()) for counts in drawn.values() if counts)
    note = f"Training samples of each device by class; areas are proportional, and the largest is {largest:,} samples."
    order = "the scenario"
    left_out = len(owned) - len(drawn)
    if left_out:
        note += f" {left_out:,} more devices are omitted; manifest.json has all."
        order = "the table of devices"
    yield Chart("Data ownership", note, Ownership(drawn, order))


def _method_chart(
    curve: MethodChart, make_plot: Callable[..., LinePlot], end: float
) -> Chart:
    """Return a chart defined by the method, with at most as many lines as there are styles."""
    lines = []
    for (name, points), style in zip(curve.lines, STYLES, strict=False):
        has_marks = len(points) <= MAX_MARKED_POINTS
        lines.append(Line(name or curve.title, points, *style, mark_points=has_marks))
    note = curve.note
    left_out = len(curve.lines) - len(lines)
    if left_out:
        note += f" {left_out} more are in metrics.json."
    y = Axis(curve.title[0].lower() + curve.title[1:], curve.kind)
    if curve.stacked:
        stack = StackedPlot(lines, curve.marks, end=end, y=y)
        return Chart(curve.title, note, stack)
    return Chart(curve.title, note, make_plot(lines, y=y))


def _reproduce_command(run: Run) -> str:
    """Return shell commands that repeat a run, with the version of the testbed as a comment."""
    revision = run.manifest["revision"]
    version = f"# testbed {run.manifest['versions']['testbed']}"
    # An installed package has no revision.
    if revision:
        version += f", revision {revision}"
    scenario = shlex.quote(str(run.path / "scenario.yaml"))
    lines = [
        version,
        run.manifest["command"],
        "# or, from the resolved scenario of this folder",
        f"testbed run {scenario} --runtime {run.outcome.runtime}",
    ]
    return "\n".join(lines)


def _flatten_values(
    value: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of nested values, without empty ones."""
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flatten_values(item, f"{prefix}{key}.")
        elif item not in (None, "", []):
            yield f"{prefix}{key}", str(item)
