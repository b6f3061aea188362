"""The tables of a run, on the terminal and on the page report.html.

Of a large run, the tables of devices and links have only notable rows (`testbed_controller.report.thinning`), with the
reason for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from testbed.common import formats
from testbed.network.link import links_from_json
from testbed.plan import Assignment
from testbed.scenario.expect import Expectation
from testbed.trace.log import EventLog
from testbed.trace.registry import metric_kind
from testbed_controller.report import declared
from testbed_controller.report.grouping import (
    LinkGroup,
    combine_links,
    describe,
    format_measurements,
    group_links,
    name_of,
)
from testbed_controller.report.tables import (
    BAR_ACTIVITIES,
    Cell,
    Column,
    Section,
    Tone,
    number_columns,
)
from testbed_controller.report.thinning import (
    MAX_SHOWN,
    limit_rows,
    notable_devices,
    notable_links,
)
from testbed_controller.results.run import Run

MOST_PRINTED = 24
"""Maximum number of devices, links or faults in the terminal."""
REASON_HEADING = "Why shown"
"""Heading of the column with the reason for which a device or link of a large run was selected."""


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
            yield limit_rows(section)


class _DeviceRow(NamedTuple):
    """A row of the table of devices: one device, or all devices together."""

    name: str
    reason: str
    """Reason for which the device was selected; empty if all are shown."""
    metrics: Mapping[str, Any]


def _devices_section(run: Run) -> Section:
    devices = run.metrics["devices"]
    selected = notable_devices(devices)
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
    rows: list[_DeviceRow] = []
    if omitted_rows:
        combined = _combine_devices(devices.values())
        rows.append(_DeviceRow(f"all {len(devices):,}", "", combined))
        note += (
            " All devices: the sums of their times, as a share of the total time."
            " Of equal devices, the first are shown."
        )
    for name, reason in selected.items():
        rows.append(_DeviceRow(name, reason, devices[name]))
    cell_makers = _device_cell_makers(
        run, has_reasons=bool(omitted_rows), has_been_down=has_been_down
    )
    table = []
    for row in rows:
        table.append([make_cell(row) for make_cell in cell_makers.values()])
    brief = "time and share of the run; overlapping activities count for each"
    return Section(
        "Devices",
        note,
        brief,
        tuple(cell_makers),
        table,
        max_printed_rows=MOST_PRINTED,
        omitted_rows=omitted_rows,
    )


def _device_cell_makers(
    run: Run, *, has_reasons: bool, has_been_down: bool
) -> dict[Column, Callable[[_DeviceRow], Cell]]:
    """Return the columns of the table of devices, each with the function making the cells."""
    units = units_of_devices(run)
    makers: dict[Column, Callable[[_DeviceRow], Cell]] = {
        Column("Device", "name"): lambda row: Cell(row.name)
    }
    if has_reasons:
        makers[Column(REASON_HEADING, shown_on="wide")] = lambda row: Cell(row.reason)
    makers[Column("Profile", shown_on="wide")] = _profile_cell
    if units:
        makers[Column("Model units", shown_on="page")] = lambda row: Cell(
            units.get(row.name, formats.NONE)
        )
    makers[Column("Share", shown_on="wide")] = _bar_cell
    for activity in ("compute", "send", "receive", "down", "idle"):
        if activity != "down" or has_been_down:
            column = Column(activity.capitalize(), "number")
            makers[column] = partial(_time_cell, activity)
    makers[Column("Sent", "number", "page")] = lambda row: Cell(
        formats.size(row.metrics["bytes_sent"])
    )
    makers[Column("Received", "number", "page")] = lambda row: Cell(
        formats.size(row.metrics["bytes_received"])
    )
    # The virtual clock charges every computation exactly its time, so only containers have a deficit.
    if run.outcome.runtime == "emulate":
        makers[Column("Deficit", "number", "page")] = lambda row: Cell(
            formats.share(row.metrics["deficit_share"])
        )
    return makers


def _bar_cell(row: _DeviceRow) -> Cell:
    shares = {kind: row.metrics[f"{kind}_share"] for kind in BAR_ACTIVITIES}
    return Cell("", shares=shares)


def _profile_cell(row: _DeviceRow) -> Cell:
    # The row of all devices has no profile.
    if "profile" not in row.metrics:
        return Cell(formats.NONE)
    return Cell(row.metrics["profile"], formats.speed(row.metrics["speed"]))


def _time_cell(activity: str, row: _DeviceRow) -> Cell:
    seconds = row.metrics[activity]
    if not seconds:
        return Cell(formats.NONE)
    # Padded, so that the times before the shares stay aligned.
    share = f"{formats.whole_share(row.metrics[f'{activity}_share']):>3}"
    tone: Tone = "no" if activity == "down" else ""
    return Cell(formats.seconds(seconds), share, tone)


def _combine_devices(devices: Collection[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of all devices together: sums of times and bytes, mean shares, and the worst deficit."""
    activities = ("compute", "send", "receive", "communicate", "down", "idle")
    combined: dict[str, float] = {}
    for name in (*activities, "bytes_sent", "bytes_received"):
        combined[name] = sum(row[name] for row in devices)
    # All devices have the same total time, the duration of the run, so the mean is the share of the total.
    for name in activities:
        combined[f"{name}_share"] = fmean(row[f"{name}_share"] for row in devices)
    combined["deficit_share"] = max(row["deficit_share"] for row in devices)
    return combined


def units_of_devices(run: Run) -> dict[str, str]:
    """Return the model units (counted from 0) and the memory of each device in the plan, as text by name."""
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
    conditions = _describe_shaping(run) if is_emulated else ""
    conditions += _describe_hosts(run)
    groups = [(group, "") for group in group_links(links)]
    omitted_rows = 0
    # With this many groups, nearly every link has values of its own: the notable links are shown instead.
    if len(groups) > MAX_SHOWN:
        selected = notable_links(links)
        omitted_rows = len(links) - len(selected)
        groups = [(combine_links(links), "")]
        for link, reason in selected:
            groups.append((group_links([link])[0], reason))
    makers: dict[Column, Callable[[LinkGroup, str], Cell]] = {
        Column("Link", "name"): lambda link, _: Cell(link.name)
    }
    if omitted_rows:
        makers[Column(REASON_HEADING, shown_on="wide")] = lambda _, reason: Cell(reason)
    makers[Column("Requested")] = lambda link, _: Cell(link.requested)
    note = (
        "Rate and one-way delay of the scenario; a simulation does not measure links. "
    )
    if is_emulated:
        makers[Column("Measured")] = _measured_cell
        note = f"Rate and one-way delay of the scenario, and as measured before the run{conditions}. "
    if run.trial.scenario.workload.counts_links:
        makers[Column("Carried", "number")] = lambda link, _: Cell(link.traffic)
        makers[Column("Used", "number", "wide")] = lambda link, _: Cell(link.used)
        note += '"Used": bytes of the busiest direction, as a share of the capacity of its rate.'
    else:
        note += "The traffic of your own programs is not known."
    rows = []
    for group, reason in groups:
        rows.append([make_cell(group, reason) for make_cell in makers.values()])
    brief = f"rate, one-way delay{conditions}"
    return Section(
        "Links",
        note,
        brief,
        tuple(makers),
        rows,
        max_printed_rows=MOST_PRINTED,
        omitted_rows=omitted_rows,
    )


def _measured_cell(link: LinkGroup, _: str) -> Cell:
    if link.problem:
        return Cell(link.measured, link.problem, "no")
    return Cell(link.measured)


def _describe_shaping(run: Run) -> str:
    """Return the backend of the links and TCP's congestion control, as the end of a sentence."""
    fidelity = run.outcome.fidelity
    if not fidelity.get("backend"):
        return ""
    algorithm = fidelity.get("congestion_control", "the host's congestion control")
    return f"; shaped by {fidelity['backend']}, TCP with {algorithm}"


def _describe_hosts(run: Run) -> str:
    """Return the hosts, their devices and the links between them, as the end of a sentence; empty for one host."""
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
    crossing = 0
    for source, destination in links:
        if host_of[source] != host_of[destination]:
            crossing += 1
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


def directions_section(run: Run) -> Section | None:
    """Return a table with a row for each direction of each link; None if the table of links has these rows itself.

    Of very many links, the table has only the notable ones.
    """
    links = run.metrics["links"]
    groups = group_links(links)
    # The table of links has a row for each direction if no group has several, and the notable ones of many groups.
    if len(groups) == len(links) or len(groups) > MAX_SHOWN:
        return None
    is_emulated = run.outcome.runtime == "emulate"
    selected = notable_links(links)
    omitted_rows = len(links) - len(selected)
    columns = [Column("From", "name"), Column("To", "name")]
    if omitted_rows:
        columns.append(Column(REASON_HEADING))
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
            row.append(Cell(format_measurements(measurements)))
        row.append(Cell(str(link["messages"])))
        row.append(Cell(formats.size(link["bytes"])))
        row.append(Cell(formats.share(link["used_share"])))
        rows.append(row)
    return Section("", "", "", tuple(columns), rows, omitted_rows=omitted_rows)


def _objects_section(metrics: Mapping[str, Any]) -> Section:
    """Return a row for each detected object, and one for each picture without any."""
    boxes_of_pictures: dict[int, Any] = {}
    for answer in metrics["series"]["objects"]:
        # Of several answers for one picture, the first one counts.
        boxes_of_pictures.setdefault(answer["sample"], answer["boxes"])
    shares = ("score", "left", "top", "right", "bottom")
    rows = []
    for sample, boxes in boxes_of_pictures.items():
        if not boxes:
            empty = [Cell(formats.NONE)] * len(shares)
            rows.append([Cell(str(sample)), Cell("none"), *empty])
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
    """Return ``detected``, ``resumed`` and ``seconds`` of the recovery from a fault.

    The duration counts from this fault. All values are None for a fault that was not detected.
    """
    for item in metrics["recovery_list"]:
        # One recovery may end the outages of several faults, each with a time of its own since its injection.
        if fault["recovered"] is not None and item["resumed"] == fault["recovered"]:
            return {**item, "seconds": fault["recovered"] - fault["struck"]}
        # Detected, but the run ended before the work resumed.
        if item["resumed"] is None and item["struck"] == fault["struck"]:
            return dict(item)
    return {"detected": None, "resumed": None, "seconds": None}


def expectations_section(run: Run) -> Section:
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
    note = "Conditions of the scenario; the command fails if any of them does not hold."
    return Section("Expectations", note, "", columns, rows)


def result_text(expectation: Expectation, run: Run) -> str:
    """Format the result of an expectation, precise enough to see whether the condition holds."""
    value = expectation.value
    if value is None:
        return "no such metric"
    kind = metric_kind(expectation.key, run.metric_definitions)
    # Rounded to 90%, a share may be below or above a limit of 0.9.
    if isinstance(value, float) and kind in ("share", "number"):
        return f"{value:.4g}"
    return declared.format_metric(expectation.key, value, run.metric_definitions)
