"""The tables of a run, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from statistics import fmean
from typing import Any, Literal

from testbed.common import formats
from testbed.network.link import links_from_json
from testbed.plan import Piece
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
from testbed_controller.report.tables import BARS, Cell, Column, Section, figures
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
    devices, emulated = run.metrics["devices"], run.outcome.runtime == "emulate"
    held, shown = holdings(run), devices_shown(devices)
    left_out = len(devices) - len(shown)
    has_been_down = any(row["down"] for row in devices.values())
    cells: dict[Column, Callable[[Shown], Cell]] = {
        Column("Device", "name"): lambda row: Cell(row[0])
    }
    if left_out:
        cells[Column("Shown for", where="wide")] = lambda row: Cell(row[1])
    cells[Column("Profile", where="wide")] = _profile_cell
    if held:
        cells[Column("Holds", where="page")] = lambda row: Cell(
            held.get(row[0], formats.NONE)
        )
    cells[Column("Share", where="wide")] = lambda row: Cell(
        "", shares={kind: row[2][f"{kind}_share"] for kind in BARS}
    )
    for kind in ("compute", "send", "receive", "down", "idle"):
        if kind != "down" or has_been_down:
            cells[Column(kind.capitalize(), "figure")] = partial(_time_cell, kind)
    cells[Column("Sent", "figure", "page")] = lambda row: Cell(
        formats.size(row[2]["bytes_sent"])
    )
    cells[Column("Received", "figure", "page")] = lambda row: Cell(
        formats.size(row[2]["bytes_received"])
    )
    note = (
        "Time and share of the run. A send lasts until the receiver has acknowledged. Sending, receiving and computing "
        "may overlap, and then count in each; idle is what none of them covers."
    )
    if has_been_down:
        note += " Down lasts until the device has booted again."
    if emulated:
        cells[Column("Deficit", "figure", "page")] = lambda row: Cell(
            formats.share(row[2]["deficit_share"])
        )
        note += (
            " Deficit: share of the undisturbed steps that the host was too slow by."
        )
    rows: list[Shown] = [(name, words, devices[name]) for name, words in shown.items()]
    if left_out:
        rows.insert(
            0, (f"all {len(devices):,}", "", _combine_devices(devices.values()))
        )
        note += " All together: the sums of their times, as a share of the time of all."
        note += " Of alike ones the first are shown."
    drawn = [[cell(row) for cell in cells.values()] for row in rows]
    brief = "time and share of the run; what overlaps counts in both"
    return Section(
        "Devices",
        note,
        brief,
        tuple(cells),
        drawn,
        most=MOST_PRINTED,
        left_out=left_out,
    )


def _profile_cell(row: Shown) -> Cell:
    figures = row[2]
    return (
        Cell(figures["profile"], formats.speed(figures["speed"]))
        if "profile" in figures
        else Cell(formats.NONE)
    )


def _time_cell(kind: str, row: Shown) -> Cell:
    figures = row[2]
    if not figures[kind]:
        return Cell(formats.NONE)
    share = f"{formats.whole_share(figures[f'{kind}_share']):>3}"
    return Cell(formats.seconds(figures[kind]), share, "no" if kind == "down" else "")


def _combine_devices(devices: Collection[Mapping[str, Any]]) -> dict[str, float]:
    """Combine the metrics of devices into one row, with the worst deficit."""
    names = ("compute", "send", "receive", "communicate", "down", "idle")
    combined = {
        name: sum(row[name] for row in devices)
        for name in (*names, "bytes_sent", "bytes_received")
    }
    shares = {
        f"{name}_share": fmean(row[f"{name}_share"] for row in devices)
        for name in names
    }
    return (
        combined
        | shares
        | {"deficit_share": max(row["deficit_share"] for row in devices)}
    )


def holdings(run: Run) -> dict[str, str]:
    """Return the model units (counted from 0) and the memory of each device in the plan."""
    return {
        name: f"{', '.join(texts)}, {formats.size(run.plan.memory(name))}"
        for name in run.plan.devices
        if (
            texts := [
                _format_units(piece)
                for piece in run.plan.of(name)
                if piece.last > piece.first
            ]
        )
    }


def _format_units(piece: Piece) -> str:
    units = (
        f"unit {piece.first}"
        if piece.last - piece.first == 1
        else f"units {piece.first}–{piece.last - 1}"
    )
    part = f"{piece.part} of " if piece.part is not None else ""
    return (
        part + units + (f" for {piece.copy_for}" if piece.copy_for is not None else "")
    )


def _links_section(run: Run) -> Section:
    emulated, links = run.outcome.runtime == "emulate", run.metrics["links"]
    shaped = _describe_shaping(run) if emulated else ""
    shaped += _hosts_section(run)
    groups, left_out = [(group, "") for group in group_links(links)], 0
    if len(groups) > MOST:  # hardly two are alike
        shown = links_shown(links)
        left_out = len(links) - len(shown)
        groups = [
            (together(links), ""),
            *((group_links([link])[0], words) for link, words in shown),
        ]
    cells: dict[Column, Callable[[LinkGroup, str], Cell]] = {
        Column("Link", "name"): lambda link, _: Cell(link.name)
    }
    if left_out:
        cells[Column("Shown for", where="wide")] = lambda _, words: Cell(words)
    cells[Column("Requested")] = lambda link, _: Cell(link.requested)
    note = "Rate and one-way delay as the scenario asks for them; a simulation measures nothing. "
    if emulated:
        cells[Column("Measured")] = _measured_cell
        note = f"Rate and one-way delay as the scenario asks for them, and as measured before the run{shaped}. "
    if not run.trial.scenario.workload.counts_links:
        note += "The links that programs of your own use are not known."
    else:
        cells[Column("Carried", "figure")] = lambda link, _: Cell(link.traffic)
        cells[Column("Used", "figure", "wide")] = lambda link, _: Cell(link.used)
        note += '"Used" is the busiest direction\'s share of what its rate could have carried.'
    rows = [[cell(*group) for cell in cells.values()] for group in groups]
    brief = f"rate, one-way delay{shaped}"
    return Section(
        "Links", note, brief, tuple(cells), rows, most=MOST_PRINTED, left_out=left_out
    )


def _measured_cell(link: LinkGroup, _: str) -> Cell:
    return (
        Cell(link.measured, link.problem, "no") if link.problem else Cell(link.measured)
    )


def _describe_shaping(run: Run) -> str:
    """Return the backend of the links and TCP's congestion control, as an addition to a sentence."""
    fidelity = run.outcome.fidelity
    if not fidelity.get("backend"):
        return ""
    algorithm = fidelity.get("congestion_control", "the host's congestion control")
    return f"; shaped by {fidelity['backend']}, TCP with {algorithm}"


def _hosts_section(run: Run) -> str:
    """Return the table of hosts, devices and underlying links; empty for a single host."""
    fidelity = run.outcome.fidelity
    hosts: dict[str, list[str]] = fidelity.get("hosts", {})
    if len(hosts) < 2:
        return ""
    at = {name: host for host, names in hosts.items() for name in names}
    links = run.trial.experiment.links
    crossing = sum(at[a] != at[b] for a, b in links)
    where = ", ".join(
        f"{', '.join(names) or 'none'} on {host}" for host, names in hosts.items()
    )
    ways = ", ".join(
        f"{a} to {b} {formats.seconds(delay)}"
        for a, b, delay in fidelity.get("ways", ())
    )
    return f"; {crossing} of {len(links)} cross hosts ({where}), whose own delay is part of what was measured ({ways})"


def _changes_section(run: Run) -> Section:
    """Return the changed links during the run, by faults, traces or commands; equal changes are merged."""
    changes: dict[tuple[float, str], list[Mapping[str, Any]]] = {}
    for event in EventLog.made_of(run.outcome.events).of("link"):
        (link,) = links_from_json([event.fields]).values()
        changes.setdefault((event.time, describe(link.to_json())), []).append(
            event.fields
        )
    rows = [
        [Cell(formats.moment(time)), Cell(name_of(links)), Cell(link)]
        for (time, link), links in changes.items()
    ]
    brief = "by faults, a trace or by hand; time since the start of the workload"
    columns = (*figures("At"), Column("Link", "name"), Column("From then on"))
    return Section(
        "Links that changed",
        f"{brief.capitalize()}.",
        brief,
        columns,
        rows,
        most=12,
        all_in="events.jsonl",
    )


def directions(run: Run) -> Section | None:
    """Return every direction of every link, or only notable ones if the table of links merges several."""
    links, emulated = run.metrics["links"], run.outcome.runtime == "emulate"
    if not len(group_links(links)) < min(len(links), MOST + 1):
        return None
    shown = links_shown(links)
    left_out = len(links) - len(shown)
    rows = [
        [
            Cell(link["source"]),
            Cell(link["destination"]),
            *([Cell(words)] if left_out else []),
            Cell(describe(link["requested"])),
            *(
                [Cell(measured([link["measured"]] if link["measured"] else []))]
                if emulated
                else []
            ),
            Cell(str(link["messages"])),
            Cell(formats.size(link["bytes"])),
            Cell(formats.share(link["used_share"])),
        ]
        for link, words in shown
    ]
    named = (
        Column("From", "name"),
        Column("To", "name"),
        *([Column("Shown for")] if left_out else []),
    )
    extra_columns = (
        *([Column("Measured")] if emulated else []),
        *figures("Messages", "Bytes", "Used"),
    )
    return Section(
        "",
        "",
        "",
        (*named, Column("Requested"), *extra_columns),
        rows,
        left_out=left_out,
    )


def _objects_section(metrics: Mapping[str, Any]) -> Section:
    first: dict[int, Any] = {}
    for answer in metrics["series"]["objects"]:
        first.setdefault(answer["sample"], answer["boxes"])
    rows = []
    for sample, boxes in first.items():
        for picture in boxes:
            shares = (
                picture[side] for side in ("score", "left", "top", "right", "bottom")
            )
            rows.append(
                [
                    Cell(str(sample)),
                    Cell(picture["label"]),
                    *(Cell(formats.share(share)) for share in shares),
                ]
            )
        if not boxes:
            rows.append([Cell(str(sample)), Cell("none"), *[Cell(formats.NONE)] * 5])
    note = (
        "Boxes of the first answer for each picture, as shares of the network's input from its upper left corner. "
        "All answers are in boxes.json beside this file, the pictures in boxes-….png."
    )
    brief = "in each picture, as first answered; sides as shares of the input"
    columns = (
        Column("Picture", "name"),
        Column("Object", "name"),
        *figures("Score", "Left", "Top", "Right", "Bottom"),
    )
    return Section("Objects", note, brief, columns, rows, most=20, all_in="boxes.json")


def _faults_section(metrics: Mapping[str, Any]) -> Section:
    rows = []
    for fault in metrics["fault_list"]:
        recovery = recovery_from(fault, metrics)
        moments = (
            fault["struck"],
            recovery["detected"],
            fault["undone"],
            recovery["resumed"],
        )
        rows.append(
            [
                Cell(f"{fault['action']} {fault['target']}"),
                Cell(formats.moment(fault["intended"])),
                Cell(formats.seconds(fault["late"])),
                *(Cell(formats.moment(moment)) for moment in moments),
                Cell(formats.seconds(recovery["seconds"])),
            ]
        )
    note = 'Instants since the start of the workload. "Late" is how long after its intended instant a fault struck.'
    columns = (Column("Fault", "name"), *figures("Intended", "Late", where="page"))
    columns += figures("Struck", "Noticed", "Undone", "Resumed", "Recovery")
    return Section(
        "Faults",
        note,
        "time since the start of the workload",
        columns,
        rows,
        most=MOST_PRINTED,
    )


def recovery_from(
    fault: Mapping[str, Any], metrics: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the recovery from a fault with its duration since the fault; None values for an undetected fault."""
    for item in metrics["recovery_list"]:
        if fault["recovered"] is not None and item["resumed"] == fault["recovered"]:
            return {**item, "seconds": fault["recovered"] - fault["struck"]}
        if item["resumed"] is None and item["struck"] == fault["struck"]:
            return dict(item)
    return {"detected": None, "resumed": None, "seconds": None}


def expected(run: Run) -> Section:
    """Return the table of expectations and results."""
    rows = []
    for one in run.expectations:
        tone: Literal["yes", "no"] = "yes" if one.holds else "no"
        mark = Cell("✔" if one.holds else "✘", tone=tone)
        result = Cell(found_text(one, run), tone="" if one.holds else "no")
        rows.append([mark, Cell(one.key), Cell(one.condition), result])
    columns = (
        Column(""),
        Column("Figure", "name"),
        Column("Condition"),
        *figures("Found"),
    )
    note = "Conditions of the scenario; the command fails if one of them fails."
    return Section("Expected", note, "", columns, rows)


def found_text(expectation: Expectation, run: Run) -> str:
    """Format the result of an expectation, precise enough to see whether it holds."""
    value = expectation.value
    if value is None:
        return "no such figure"
    if isinstance(value, float) and metric_kind(expectation.key, run.figures) in (
        "share",
        "number",
    ):
        return f"{value:.4g}"
    return declared.figure(expectation.key, value, run.figures)
