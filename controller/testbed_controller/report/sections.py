"""The tables of a run, on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from statistics import fmean
from typing import Any

from testbed.common import formats
from testbed.network.link import links_from_json
from testbed.plan import Assignment
from testbed.scenario.expect import Expectation
from testbed.trace.log import EventLog
from testbed.trace.registry import metric_kind
from testbed_controller.report import declared
from testbed_controller.report.grouping import (
    LinkGroup,
    describe,
    group_links,
    measured,
    name_of,
    together,
)
from testbed_controller.report.tables import (
    BAR_ACTIVITIES,
    Cell,
    Column,
    Section,
    number_columns,
)
from testbed_controller.report.thinning import (
    MOST,
    devices_shown,
    links_shown,
    shortened,
)
from testbed_controller.results.run import Run

MOST_PRINTED = 24
"""Maximum number of devices, links or faults in the terminal."""


def sections(run: Run) -> Iterator[Section]:
    """Yield the non-empty tables of a run."""
    for section in (
        _devices_section(run),
        _links_section(run),
        _changes_section(run),
        _objects_section(run.metrics),
        _faults_section(run.metrics),
        *declared.tables(run),
    ):
        if section.rows:
            yield shortened(section)


Shown = tuple[str, str, Mapping[str, Any]]
"""A row of the table of devices: name, the reason for its selection, and metrics."""


def _devices_section(run: Run) -> Section:
    devices = run.metrics["devices"]
    selected = devices_shown(devices)
    omitted_rows = len(devices) - len(selected)
    has_been_down = any(row["down"] for row in devices.values())
    note = (
        "Time and share of the run. A send lasts until the receiver has acknowledged. Time in which a device sends, "
        "receives and computes at once counts for each of them; a device is idle while it does none of them."
    )
    if has_been_down:
        note += " A device is down until it has booted again."
    if run.outcome.runtime == "emulate":
        note += (
            " Deficit: share of the undisturbed steps by which the host was too slow."
        )
    rows: list[Shown] = []
    if omitted_rows:
        combined = _combine_devices(devices.values())
        rows.append((f"all {len(devices):,}", "", combined))
        note += (
            " All devices: the sums of their times, as a share of the total time."
            " Of equal devices, the first are shown."
        )
    for name, reason in selected.items():
        rows.append((name, reason, devices[name]))
    cells = _device_cells(run, selected=bool(omitted_rows), has_been_down=has_been_down)
    table = []
    for row in rows:
        table.append([make_cell(row) for make_cell in cells.values()])
    brief = "time and share of the run; overlapping activities count for each"
    return Section(
        "Devices",
        note,
        brief,
        tuple(cells),
        table,
        max_printed_rows=MOST_PRINTED,
        omitted_rows=omitted_rows,
    )


def _device_cells(
    run: Run, *, selected: bool, has_been_down: bool
) -> dict[Column, Callable[[Shown], Cell]]:
    """Return the columns of the table of devices, each with the function that makes its cells."""
    units = holdings(run)
    cells: dict[Column, Callable[[Shown], Cell]] = {
        Column("Device", "name"): lambda row: Cell(row[0])
    }
    if selected:
        cells[Column("Shown for", shown_on="wide")] = lambda row: Cell(row[1])
    cells[Column("Profile", shown_on="wide")] = _profile_cell
    if units:
        cells[Column("Model units", shown_on="page")] = lambda row: Cell(
            units.get(row[0], formats.NONE)
        )
    cells[Column("Share", shown_on="wide")] = _bar_cell
    for kind in ("compute", "send", "receive", "down", "idle"):
        if kind != "down" or has_been_down:
            cells[Column(kind.capitalize(), "number")] = partial(_time_cell, kind)
    cells[Column("Sent", "number", "page")] = lambda row: Cell(
        formats.size(row[2]["bytes_sent"])
    )
    cells[Column("Received", "number", "page")] = lambda row: Cell(
        formats.size(row[2]["bytes_received"])
    )
    # The virtual clock charges every computation exactly its time.
    if run.outcome.runtime == "emulate":
        cells[Column("Deficit", "number", "page")] = lambda row: Cell(
            formats.share(row[2]["deficit_share"])
        )
    return cells


def _bar_cell(row: Shown) -> Cell:
    metrics = row[2]
    shares = {kind: metrics[f"{kind}_share"] for kind in BAR_ACTIVITIES}
    return Cell("", shares=shares)


def _profile_cell(row: Shown) -> Cell:
    metrics = row[2]
    # The row of all devices has no profile.
    if "profile" not in metrics:
        return Cell(formats.NONE)
    return Cell(metrics["profile"], formats.speed(metrics["speed"]))


def _time_cell(kind: str, row: Shown) -> Cell:
    metrics = row[2]
    if not metrics[kind]:
        return Cell(formats.NONE)
    # Padded, so that the times before the shares stay aligned.
    share = f"{formats.whole_share(metrics[f'{kind}_share']):>3}"
    return Cell(formats.seconds(metrics[kind]), share, "no" if kind == "down" else "")


def _combine_devices(devices: Collection[Mapping[str, Any]]) -> dict[str, float]:
    """Combine the metrics of devices into one row, with the worst deficit."""
    activities = ("compute", "send", "receive", "communicate", "down", "idle")
    combined: dict[str, float] = {}
    for name in (*activities, "bytes_sent", "bytes_received"):
        combined[name] = sum(row[name] for row in devices)
    # All devices have the same total time, the duration of the run, so the mean is the share of the total.
    for name in activities:
        combined[f"{name}_share"] = fmean(row[f"{name}_share"] for row in devices)
    combined["deficit_share"] = max(row["deficit_share"] for row in devices)
    return combined


def holdings(run: Run) -> dict[str, str]:
    """Return the model units (counted from 0) and the memory of each device in the plan."""
    texts = {}
    for name in run.plan.devices:
        units = []
        for assignment in run.plan.assignments_of(name):
            # An assignment may have no unit.
            if assignment.stop > assignment.start:
                units.append(_format_units(assignment))
        if units:
            memory = formats.size(run.plan.memory(name))
            texts[name] = f"{', '.join(units)}, {memory}"
    return texts


def _format_units(assignment: Assignment) -> str:
    text = f"unit {assignment.start}"
    if assignment.stop - assignment.start > 1:
        text = f"units {assignment.start}–{assignment.stop - 1}"
    if assignment.part is not None:
        text = f"{assignment.part} of {text}"
    if assignment.copy_for is not None:
        text = f"{text} for {assignment.copy_for}"
    return text


def _links_section(run: Run) -> Section:
    is_emulated = run.outcome.runtime == "emulate"
    links = run.metrics["links"]
    shaped = _describe_shaping(run) if is_emulated else ""
    shaped += _describe_hosts(run)
    groups = [(group, "") for group in group_links(links)]
    omitted_rows = 0
    # With this many groups, nearly every link has values of its own: the notable links are shown instead.
    if len(groups) > MOST:
        selected = links_shown(links)
        omitted_rows = len(links) - len(selected)
        groups = [(together(links), "")]
        for link, reason in selected:
            groups.append((group_links([link])[0], reason))
    cells: dict[Column, Callable[[LinkGroup, str], Cell]] = {
        Column("Link", "name"): lambda link, _: Cell(link.name)
    }
    if omitted_rows:
        cells[Column("Shown for", shown_on="wide")] = lambda _, reason: Cell(reason)
    cells[Column("Requested")] = lambda link, _: Cell(link.requested)
    note = (
        "Rate and one-way delay of the scenario; a simulation does not measure links. "
    )
    if is_emulated:
        cells[Column("Measured")] = _measured_cell
        note = f"Rate and one-way delay of the scenario, and as measured before the run{shaped}. "
    if run.trial.scenario.workload.counts_links:
        cells[Column("Carried", "number")] = lambda link, _: Cell(link.traffic)
        cells[Column("Used", "number", "wide")] = lambda link, _: Cell(link.used)
        note += '"Used": bytes of the busiest direction, as a share of the capacity of its rate.'
    else:
        note += "The traffic of your own programs is not known."
    rows = []
    for group, reason in groups:
        rows.append([make_cell(group, reason) for make_cell in cells.values()])
    brief = f"rate, one-way delay{shaped}"
    return Section(
        "Links",
        note,
        brief,
        tuple(cells),
        rows,
        max_printed_rows=MOST_PRINTED,
        omitted_rows=omitted_rows,
    )


def _measured_cell(link: LinkGroup, _: str) -> Cell:
    if link.problem:
        return Cell(link.measured, link.problem, "no")
    return Cell(link.measured)


def _describe_shaping(run: Run) -> str:
    """Return the backend of the links and TCP's congestion control, as an addition to a sentence."""
    fidelity = run.outcome.fidelity
    if not fidelity.get("backend"):
        return ""
    algorithm = fidelity.get("congestion_control", "the host's congestion control")
    return f"; shaped by {fidelity['backend']}, TCP with {algorithm}"


def _describe_hosts(run: Run) -> str:
    """Return the hosts, their devices and the links between them, as an addition to a sentence; empty for one host."""
    fidelity = run.outcome.fidelity
    hosts: dict[str, list[str]] = fidelity.get("hosts", {})
    if len(hosts) < 2:
        return ""
    host_of: dict[str, str] = {}
    places = []
    for host, names in hosts.items():
        host_of |= dict.fromkeys(names, host)
        places.append(f"{', '.join(names) or 'none'} on {host}")
    delays = []
    for start, end, delay in fidelity.get("ways", ()):
        delays.append(f"{start} to {end} {formats.seconds(delay)}")
    links = run.trial.experiment.links
    crossing = sum(host_of[a] != host_of[b] for a, b in links)
    return (
        f"; {crossing} of {len(links)} cross hosts ({', '.join(places)}), whose own delay is included in the "
        f"measurement ({', '.join(delays)})"
    )


def _changes_section(run: Run) -> Section:
    """Return the link changes during the run, by faults, traces or commands; equal changes are merged."""
    changes: dict[tuple[float, str], list[Mapping[str, Any]]] = {}
    for event in EventLog.made_of(run.outcome.events).of("link"):
        (link,) = links_from_json([event.fields]).values()
        change = (event.time, describe(link.to_json()))
        changes.setdefault(change, []).append(event.fields)
    rows = []
    for (time, link_text), links in changes.items():
        rows.append([Cell(formats.moment(time)), Cell(name_of(links)), Cell(link_text)])
    brief = "by faults, a link trace or a command; time since the start of the workload"
    columns = (*number_columns("Time"), Column("Link", "name"), Column("New values"))
    return Section(
        "Link changes",
        f"{brief.capitalize()}.",
        brief,
        columns,
        rows,
        max_printed_rows=12,
        complete_file="events.jsonl",
    )


def directions(run: Run) -> Section | None:
    """Return every direction of every link, or only notable ones if the table of links merges several."""
    links = run.metrics["links"]
    groups = group_links(links)
    # Without merged links the table of links has all directions; with more groups it has the notable ones.
    if len(groups) == len(links) or len(groups) > MOST:
        return None
    is_emulated = run.outcome.runtime == "emulate"
    selected = links_shown(links)
    omitted_rows = len(links) - len(selected)
    columns = [Column("From", "name"), Column("To", "name")]
    if omitted_rows:
        columns.append(Column("Shown for"))
    columns.append(Column("Requested"))
    if is_emulated:
        columns.append(Column("Measured"))
    columns += number_columns("Messages", "Bytes", "Used")
    rows = []
    for link, reason in selected:
        row = [Cell(link["source"]), Cell(link["destination"])]
        if omitted_rows:
            row.append(Cell(reason))
        row.append(Cell(describe(link["requested"])))
        if is_emulated:
            measurements = [link["measured"]] if link["measured"] else []
            row.append(Cell(measured(measurements)))
        row.append(Cell(str(link["messages"])))
        row.append(Cell(formats.size(link["bytes"])))
        row.append(Cell(formats.share(link["used_share"])))
        rows.append(row)
    return Section("", "", "", tuple(columns), rows, omitted_rows=omitted_rows)


def _objects_section(metrics: Mapping[str, Any]) -> Section:
    """Return a row for each detected object, and one for each picture without any."""
    first_answers: dict[int, Any] = {}
    for answer in metrics["series"]["objects"]:
        first_answers.setdefault(answer["sample"], answer["boxes"])
    shares = ("score", "left", "top", "right", "bottom")
    rows = []
    for sample, boxes in first_answers.items():
        if not boxes:
            rows.append([Cell(str(sample)), Cell("none"), *[Cell(formats.NONE)] * 5])
        for box in boxes:
            row = [Cell(str(sample)), Cell(box["label"])]
            row += [Cell(formats.share(box[name])) for name in shares]
            rows.append(row)
    note = (
        "Boxes of the first answer for each picture; positions are shares of the input, from its upper left corner. "
        "All answers are in boxes.json beside this file, the pictures in boxes-….png."
    )
    brief = "in each picture, by the first answer; positions as shares of the input"
    columns = (
        Column("Picture", "name"),
        Column("Object", "name"),
        *number_columns("Score", "Left", "Top", "Right", "Bottom"),
    )
    return Section(
        "Objects",
        note,
        brief,
        columns,
        rows,
        max_printed_rows=20,
        complete_file="boxes.json",
    )


def _faults_section(metrics: Mapping[str, Any]) -> Section:
    rows = []
    for fault in metrics["fault_list"]:
        recovery = recovery_from(fault, metrics)
        rows.append(
            [
                Cell(f"{fault['action']} {fault['target']}"),
                Cell(formats.moment(fault["intended"])),
                Cell(formats.seconds(fault["late"])),
                Cell(formats.moment(fault["struck"])),
                Cell(formats.moment(recovery["detected"])),
                Cell(formats.moment(fault["undone"])),
                Cell(formats.moment(recovery["resumed"])),
                Cell(formats.seconds(recovery["seconds"])),
            ]
        )
    note = (
        'Times since the start of the workload. "Late" is the time from the scheduled to the actual injection, '
        '"Recovery" the time from the injection until the work resumed.'
    )
    columns = (
        Column("Fault", "name"),
        *number_columns("Scheduled", "Late", shown_on="page"),
    )
    columns += number_columns("Injected", "Detected", "Reverted", "Resumed", "Recovery")
    return Section(
        "Faults",
        note,
        "time since the start of the workload",
        columns,
        rows,
        max_printed_rows=MOST_PRINTED,
    )


def recovery_from(
    fault: Mapping[str, Any], metrics: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the recovery from a fault with its duration since the fault; None values for an undetected fault."""
    for item in metrics["recovery_list"]:
        # One recovery may end the outages of several faults, each with a time of its own since its injection.
        if fault["recovered"] is not None and item["resumed"] == fault["recovered"]:
            return {**item, "seconds": fault["recovered"] - fault["struck"]}
        # Detected, but the run ended before the work resumed.
        if item["resumed"] is None and item["struck"] == fault["struck"]:
            return dict(item)
    return {"detected": None, "resumed": None, "seconds": None}


def expected(run: Run) -> Section:
    """Return the table of expectations and results."""
    rows = []
    for each in run.expectations:
        mark = Cell("✔", tone="yes") if each.holds else Cell("✘", tone="no")
        result = Cell(result_text(each, run), tone="" if each.holds else "no")
        rows.append([mark, Cell(each.key), Cell(each.condition), result])
    columns = (
        Column(""),
        Column("Metric", "name"),
        Column("Condition"),
        *number_columns("Result"),
    )
    note = "Conditions of the scenario; the command fails if one of them does not hold."
    return Section("Expectations", note, "", columns, rows)


def result_text(expectation: Expectation, run: Run) -> str:
    """Format the result of an expectation, precise enough to see whether the condition holds."""
    value = expectation.value
    if value is None:
        return "no such metric"
    kind = metric_kind(expectation.key, run.metric_definitions)
    # A share formatted as 90% may be below or above the limit of 0.9.
    if isinstance(value, float) and kind in ("share", "number"):
        return f"{value:.4g}"
    return declared.format_metric(expectation.key, value, run.metric_definitions)
