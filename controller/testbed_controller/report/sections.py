"""The tables of a run, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from statistics import fmean
from typing import Any, Literal

from testbed.common import formats
from testbed.network.link import links_from_json
from testbed.plan import Piece
from testbed.scenario.expect import Expectation
from testbed.trace.log import EventLog
from testbed.trace.registry import kind_of
from testbed_controller.report import declared
from testbed_controller.report.grouping import describe, group_links, measured, name_of, together
from testbed_controller.report.tables import BARS, Cell, Column, Section, figures
from testbed_controller.report.thinning import MOST, devices_shown, links_shown, shortened
from testbed_controller.results.run import Run

MOST_PRINTED = 24
"""Devices, links or faults that a terminal has."""


def sections(run: Run) -> Iterator[Section]:
    """Yield the tables of a run, those that have a row."""
    for section in (
        _devices(run),
        _links(run),
        _changed(run),
        _objects(run.metrics),
        _faults(run.metrics),
        *declared.tables(run),
    ):
        if section.rows:
            yield shortened(section)


def _devices(run: Run) -> Section:
    devices, emulated = run.metrics["devices"], run.outcome.runtime == "emulate"
    kinds = ["compute", "send", "receive", *(["down"] if any(row["down"] for row in devices.values()) else []), "idle"]
    held, shown = holdings(run), devices_shown(devices)
    left_out = len(devices) - len(shown)

    def spent(kind: str, row: Mapping[str, Any]) -> Cell:
        if not row[kind]:
            return Cell(formats.NONE)
        share = f"{formats.whole_share(row[f'{kind}_share']):>3}"
        return Cell(formats.seconds(row[kind]), share, "no" if kind == "down" else "")

    def cells(name: str, words: str, profile: Cell, row: Mapping[str, Any]) -> list[Cell]:
        return [
            Cell(name),
            *([Cell(words)] if left_out else []),
            profile,
            *([Cell(held.get(name, formats.NONE))] if held else []),
            Cell("", shares={kind: row[f"{kind}_share"] for kind in BARS}),
            *(spent(kind, row) for kind in kinds),
            Cell(formats.size(row["bytes_sent"])),
            Cell(formats.size(row["bytes_received"])),
            *([Cell(formats.share(row["deficit_share"]))] if emulated else []),
        ]

    rows = [
        cells(name, words, Cell(devices[name]["profile"], formats.speed(devices[name]["speed"])), devices[name])
        for name, words in shown.items()
    ]
    if left_out:
        rows.insert(0, cells(f"all {len(devices):,}", "", Cell(formats.NONE), _together(devices.values())))
    columns = (
        Column("Device", "name"),
        *([Column("Shown for", where="wide")] if left_out else []),
        Column("Profile", where="wide"),
        *([Column("Holds", where="page")] if held else []),
        Column("Share", where="wide"),
        *figures(*map(str.capitalize, kinds)),
        *figures("Sent", "Received", *(["Deficit"] if emulated else []), where="page"),
    )
    note = (
        "Time and share of the run. A send lasts until the receiver has acknowledged. Sending, receiving and computing "
        "may overlap, and then count in each; idle is what none of them covers."
    )
    note += " Down lasts until the device has booted again." if "down" in kinds else ""
    note += " Deficit: share of the undisturbed steps that the host was too slow by." if emulated else ""
    if left_out:
        note += (
            " All together: the sums of their times, as a share of the time of all. Of alike ones the first are shown."
        )
    brief = "time and share of the run; what overlaps counts in both"
    return Section("Devices", note, brief, columns, rows, most=MOST_PRINTED, left_out=left_out)


def _together(devices: Collection[Mapping[str, Any]]) -> dict[str, float]:
    """Return the figures of devices as if they were one, the deficit being that of the worst."""
    names = ("compute", "send", "receive", "communicate", "down", "idle")
    found = {name: sum(row[name] for row in devices) for name in (*names, "bytes_sent", "bytes_received")}
    shares = {f"{name}_share": fmean(row[f"{name}_share"] for row in devices) for name in names}
    return found | shares | {"deficit_share": max(row["deficit_share"] for row in devices)}


def holdings(run: Run) -> dict[str, str]:
    """Return which units of the model each device of the plan holds, counted from 0, and the memory they take."""
    return {
        name: f"{', '.join(texts)}, {formats.size(run.plan.memory(name))}"
        for name in run.plan.devices
        if (texts := [_units(piece) for piece in run.plan.of(name) if piece.last > piece.first])
    }


def _units(piece: Piece) -> str:
    units = f"unit {piece.first}" if piece.last - piece.first == 1 else f"units {piece.first}–{piece.last - 1}"
    part = f"{piece.part} of " if piece.part is not None else ""
    return part + units + (f" for {piece.copy_for}" if piece.copy_for is not None else "")


def _links(run: Run) -> Section:
    emulated = run.outcome.runtime == "emulate"
    shaped = ""
    if emulated and (backend := run.outcome.fidelity.get("backend")):
        algorithm = run.outcome.fidelity.get("congestion_control", "the host's congestion control")
        shaped = f"; shaped by {backend}, TCP with {algorithm}"
    shaped += _across(run)
    # Of programs of one's own only what each device sends is known, not over which link.
    counted = run.trial.scenario.workload.task != "program"
    rows = []
    links = run.metrics["links"]
    groups, left_out = [(group, "") for group in group_links(links)], 0
    if len(groups) > MOST:  # hardly two are alike
        shown = links_shown(links)
        left_out = len(links) - len(shown)
        groups = [(together(links), ""), *((group_links([link])[0], words) for link, words in shown)]
    for group, words in groups:
        measured = Cell(group.measured, group.problem or "", "no" if group.problem else "")
        cells = [Cell(group.name), *([Cell(words)] if left_out else []), Cell(group.requested)]
        cells += [measured] if emulated else []
        rows.append([*cells, *([Cell(group.traffic), Cell(group.used)] if counted else [])])
    found = f", and as measured before the run{shaped}" if emulated else "; a simulation measures nothing"
    note = f"Rate and one-way delay as the scenario asks for them{found}. "
    if counted:
        note += '"Used" is the busiest direction\'s share of what its rate could have carried.'
    else:
        note += "Which link carried what is not known of programs of one's own."
    columns = (Column("Link", "name"), *([Column("Shown for", where="wide")] if left_out else []), Column("Requested"))
    columns += (Column("Measured"),) if emulated else ()
    columns += (*figures("Carried"), *figures("Used", where="wide")) if counted else ()
    return Section("Links", note, f"rate, one-way delay{shaped}", columns, rows, most=MOST_PRINTED, left_out=left_out)


def _across(run: Run) -> str:
    """Say which devices were on which host, and what lay beneath the links between them; nothing of one host."""
    fidelity = run.outcome.fidelity
    hosts: dict[str, list[str]] = fidelity.get("hosts", {})
    if len(hosts) < 2:
        return ""
    at = {name: host for host, names in hosts.items() for name in names}
    links = run.trial.experiment.links
    crossing = sum(at[a] != at[b] for a, b in links)
    where = ", ".join(f"{', '.join(names) or 'none'} on {host}" for host, names in hosts.items())
    ways = ", ".join(f"{a} to {b} {formats.seconds(delay)}" for a, b, delay in fidelity.get("ways", ()))
    return f"; {crossing} of {len(links)} cross hosts ({where}), whose own delay is part of what was measured ({ways})"


def _changed(run: Run) -> Section:
    """Return what links became while the run went on, by faults, by a trace or by hand; alike changes are one."""
    changes: dict[tuple[float, str], list[Mapping[str, Any]]] = {}
    for event in EventLog.made_of(run.outcome.events).of("link"):
        (link,) = links_from_json([event.fields]).values()
        changes.setdefault((event.time, describe(link.to_json())), []).append(event.fields)
    rows = [[Cell(formats.moment(time)), Cell(name_of(links)), Cell(link)] for (time, link), links in changes.items()]
    brief = "by faults, a trace or by hand; time since the start of the workload"
    columns = (*figures("At"), Column("Link", "name"), Column("From then on"))
    return Section("Links that changed", f"{brief.capitalize()}.", brief, columns, rows, most=12, all_in="events.jsonl")


def directions(run: Run) -> Section | None:
    """Return every direction of every link, or those that stand out, where the table of links puts several into one."""
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
            *([Cell(measured([link["measured"]] if link["measured"] else []))] if emulated else []),
            Cell(str(link["messages"])),
            Cell(formats.size(link["bytes"])),
            Cell(formats.share(link["used_share"])),
        ]
        for link, words in shown
    ]
    named = (Column("From", "name"), Column("To", "name"), *([Column("Shown for")] if left_out else []))
    found = (*([Column("Measured")] if emulated else []), *figures("Messages", "Bytes", "Used"))
    return Section("", "", "", (*named, Column("Requested"), *found), rows, left_out=left_out)


def _objects(metrics: Mapping[str, Any]) -> Section:
    first: dict[int, Any] = {}
    for answer in metrics["series"]["objects"]:
        first.setdefault(answer["sample"], answer["boxes"])
    rows = []
    for sample, boxes in first.items():
        for found in boxes:
            shares = (found[side] for side in ("score", "left", "top", "right", "bottom"))
            rows.append([Cell(str(sample)), Cell(found["label"]), *(Cell(formats.share(share)) for share in shares)])
        if not boxes:
            rows.append([Cell(str(sample)), Cell("none"), *[Cell(formats.NONE)] * 5])
    note = (
        "In the first answer about each picture, sides as shares of the network's input from its upper left corner. "
        "boxes.json beside this file has every answer, boxes-….png the pictures."
    )
    brief = "in each picture, as first answered; sides as shares of the input"
    columns = (Column("Picture", "name"), Column("Object", "name"), *figures("Score", "Left", "Top", "Right", "Bottom"))
    return Section("Objects", note, brief, columns, rows, most=20, all_in="boxes.json")


def _faults(metrics: Mapping[str, Any]) -> Section:
    rows = []
    for fault in metrics["fault_list"]:
        recovery = recovery_from(fault, metrics)
        moments = (fault["struck"], recovery["detected"], fault["undone"], recovery["resumed"])
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
    return Section("Faults", note, "time since the start of the workload", columns, rows, most=MOST_PRINTED)


def recovery_from(fault: Mapping[str, Any], metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the recovery that a fault led to, its seconds from this fault; all None when the method noticed none."""
    for item in metrics["recovery_list"]:
        if fault["recovered"] is not None and item["resumed"] == fault["recovered"]:
            return {**item, "seconds": fault["recovered"] - fault["struck"]}
        if item["resumed"] is None and item["struck"] == fault["struck"]:
            return dict(item)
    return {"detected": None, "resumed": None, "seconds": None}


def expected(run: Run) -> Section:
    """Return what the scenario expects, and what came about."""
    rows = []
    for one in run.expectations:
        tone: Literal["yes", "no"] = "yes" if one.holds else "no"
        mark = Cell("✔" if one.holds else "✘", tone=tone)
        found = Cell(found_text(one, run), tone="" if one.holds else "no")
        rows.append([mark, Cell(one.key), Cell(one.condition), found])
    columns = (Column(""), Column("Figure", "name"), Column("Condition"), *figures("Found"))
    note = "What the scenario demands; one that does not hold makes the command fail."
    return Section("Expected", note, "", columns, rows)


def found_text(expectation: Expectation, run: Run) -> str:
    """Write what became of an expectation, exactly enough to see why it holds or not."""
    value = expectation.value
    if value is None:
        return "no such figure"
    if isinstance(value, float) and kind_of(expectation.key, run.figures) in ("share", "number"):
        return f"{value:.4g}"
    return declared.figure(expectation.key, value, run.figures)
