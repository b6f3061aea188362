"""The tables of a run, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from controller.report import declared
from controller.report.grouping import describe, group_links, measured, name_of
from controller.report.tables import BARS, Cell, Column, Section, figures
from controller.results.run import Run
from testbed.common import formats
from testbed.network.link import links_from_json
from testbed.plan import Piece
from testbed.scenario.expect import Expectation
from testbed.trace.log import EventLog
from testbed.trace.registry import kind_of

MOST_DIRECTIONS = 400
"""Links of a run, and changes of links, that a page lists one by one."""


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
            yield section


def _devices(run: Run) -> Section:
    devices, emulated = run.metrics["devices"], run.outcome.runtime == "emulate"
    kinds = ["compute", "send", "receive", *(["down"] if any(row["down"] for row in devices.values()) else []), "idle"]
    held = holdings(run)

    def spent(kind: str, row: Mapping[str, Any]) -> Cell:
        if not row[kind]:
            return Cell(formats.NONE)
        share = f"{formats.whole_share(row[f'{kind}_share']):>3}"
        return Cell(formats.seconds(row[kind]), share, "no" if kind == "down" else "")

    rows = [
        [
            Cell(name),
            Cell(row["profile"], formats.speed(row["speed"])),
            *([Cell(held.get(name, formats.NONE))] if held else []),
            Cell("", shares={kind: row[f"{kind}_share"] for kind in BARS}),
            *(spent(kind, row) for kind in kinds),
            Cell(formats.size(row["bytes_sent"])),
            Cell(formats.size(row["bytes_received"])),
            *([Cell(formats.share(row["deficit_share"]))] if emulated else []),
        ]
        for name, row in devices.items()
    ]
    columns = (
        Column("Device", "name"),
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
    return Section("Devices", note, "time and share of the run; what overlaps counts in both", columns, rows, most=24)


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
    backend = run.outcome.fidelity.get("backend") if emulated else None
    shaped = (f"; shaped by {backend}" if backend else "") + _across(run)
    # Of programs of one's own only what each device sends is known, not over which link.
    counted = run.trial.scenario.workload.task != "program"
    rows = []
    for group in group_links(run.metrics["links"]):
        measured = Cell(group.measured, group.problem or "", "no" if group.problem else "")
        cells = [Cell(group.name), Cell(group.requested), *([measured] if emulated else [])]
        rows.append([*cells, *([Cell(group.traffic), Cell(group.used)] if counted else [])])
    found = f", and as measured before the run{shaped}" if emulated else "; a simulation measures nothing"
    note = f"Rate and one-way delay as the scenario asks for them{found}. "
    if counted:
        note += '"Used" is the busiest direction\'s share of what its rate could have carried.'
    else:
        note += "Which link carried what is not known of programs of one's own."
    columns = (Column("Link", "name"), Column("Requested"), *([Column("Measured")] if emulated else []))
    columns += (*figures("Carried"), *figures("Used", where="wide")) if counted else ()
    return Section("Links", note, f"rate, one-way delay{shaped}", columns, rows)


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
    rows = [
        [Cell(formats.moment(time)), Cell(name_of(links)), Cell(link)]
        for (time, link), links in list(changes.items())[:MOST_DIRECTIONS]
    ]
    brief = "by faults, a trace or by hand; time since the start of the workload"
    columns = (*figures("At"), Column("Link", "name"), Column("From then on"))
    return Section("Links that changed", f"{brief.capitalize()}.", brief, columns, rows, most=12)


def directions(run: Run) -> Section | None:
    """Return every direction of every link, where the table of links puts several into one and they are not many."""
    links, emulated = run.metrics["links"], run.outcome.runtime == "emulate"
    if not len(group_links(links)) < len(links) <= MOST_DIRECTIONS:
        return None
    rows = [
        [
            Cell(link["source"]),
            Cell(link["destination"]),
            Cell(describe(link["requested"])),
            *([Cell(measured([link["measured"]] if link["measured"] else []))] if emulated else []),
            Cell(str(link["messages"])),
            Cell(formats.size(link["bytes"])),
            Cell(formats.share(link["used_share"])),
        ]
        for link in links
    ]
    asked = (Column("From", "name"), Column("To", "name"), Column("Requested"))
    found = (*([Column("Measured")] if emulated else []), *figures("Messages", "Bytes", "Used"))
    return Section("", "", "", (*asked, *found), rows)


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
    return Section("Objects", note, brief, columns, rows, most=20)


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
    return Section("Faults", note, "time since the start of the workload", columns, rows)


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
