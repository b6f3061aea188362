"""All figures of publications: which of their scenarios are to be run again, and what the documentation shows of them.

``docs/papers.yaml`` lists scenarios, with what is changed of them. What came of each is kept in ``docs/papers.json``.
The tables of ``docs/papers.md`` are written from it and from what the scenarios say: nothing is typed by hand.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from testbed.common import formats
from testbed.common.errors import InputError
from testbed.ml import kernels
from testbed.scenario.loading import load, read_keys
from testbed.scenario.paper import paper_value
from testbed.scenario.schema import PaperPart
from testbed_controller.results.files import UNSHOWN
from testbed_controller.results.recorder import RUNNING
from testbed_controller.results.reproduction import ReproducedRow, outcome, table

LIST, RESULTS, PAGE = "papers.yaml", "papers.json", "papers.md"
WORDS = ("note", "explains", "formula", "claim", "value", "paper", "outcome", "ratio")
"""What a scenario says of a row, the paper's figure among it, and what follows from that and our figures: not kept."""


@dataclass(frozen=True)
class Entry:
    """A scenario of a publication's figures, as it is run for the documentation."""

    scenario: str
    """Its name without ``papers/``."""
    changes: tuple[str, ...] = ()
    """What is changed of it, as ``--set`` has it."""

    @property
    def command(self) -> list[str]:
        """The command that runs it."""
        changes = [each for change in self.changes for each in ("--set", change)]
        return ["testbed", "run", f"papers/{self.scenario}", "--runtime", "simulate", *changes]

    def digest(self) -> str:
        """Return what changes with the scenario's runs or rows, and with nothing else. Raises `InputError`."""
        said = self._said()
        rows = [_figures(row) | {"note": None} for row in (said.get("paper") or {}).get("rows", ())]
        return _digest(_shown(said) | {"rows": rows})

    def runs(self) -> str:
        """Return what changes with the scenario's runs alone. Raises `InputError`."""
        return _digest(_shown(self._said()))

    def _said(self) -> dict[str, Any]:
        # What the file says, and no defaults: an option that is new would make everything stale.
        return load(f"papers/{self.scenario}", self.changes).model_dump(mode="json", by_alias=True, exclude_unset=True)


def _shown(said: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in said.items() if key not in UNSHOWN}


def _digest(kept: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def listed(folder: Path) -> list[Entry]:
    """Return the scenarios that ``papers.yaml`` in the folder of the documentation lists. Raises `InputError`."""
    file = folder / LIST
    if not file.is_file():
        raise InputError(f"{file}: is not there: the figures are kept in a checkout of the testbed, so work in one")
    return [
        Entry(
            name, tuple(f"{key}={each if isinstance(each, str) else json.dumps(each)}" for key, each in changes.items())
        )
        for name, changes in read_keys(file).items()
    ]


def kept(folder: Path) -> dict[str, Any]:
    """Return what is kept of the scenarios that were run, by their names."""
    file = folder / RESULTS
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def result(entry: Entry, runs: Path) -> dict[str, Any]:
    """Return what is kept of a scenario whose runs are in a folder.

    Raises `InputError` where one did not finish, or where the verdict is against one that a row is about.
    """
    manifests = [json.loads(each.read_text(encoding="utf-8")) for each in sorted(runs.glob("**/manifest.json"))]
    failed = [each for each in manifests if each["status"] != "finished"]
    if failed or not manifests or not (runs / "paper.json").is_file():
        said = {RUNNING: "was cut off"}.get(failed[0]["status"], failed[0]["status"]) if failed else "is not there"
        raise InputError(f"{runs}: a run of {entry.scenario} {said}: run 'testbed papers' again to go on")
    document = json.loads((runs / "paper.json").read_text(encoding="utf-8"))
    untrusted = next((row["name"] for row in document["rows"] if row["untrusted"]), None)
    if untrusted is not None:
        raise InputError(
            f"{runs}: a run of the row '{untrusted}' is not trusted: change {entry.scenario} by what it says"
        )
    return {
        "command": shlex.join(entry.command),
        "digest": entry.digest(),
        "revision": manifests[0]["revision"],
        "computing": manifests[0]["host"].get("computing", []),
        "date": manifests[0]["date"][:10],
        "seeds": sorted({each["seed"] + each["repetition"] for each in manifests}),
        "runs": len(manifests),
        "seconds": round(sum(each["wall_seconds"] for each in manifests)),
        "rows": [_figures(row) for row in document["rows"]],
    }


def _figures(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in WORDS}


def worded(entries: Sequence[Entry], results: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept with what its scenarios say of it now, without rows that they no longer have.

    Raises `InputError`.
    """
    parts = {
        each.scenario: load(f"papers/{each.scenario}", each.changes).paper
        for each in entries
        if each.scenario in results
    }
    return {name: _worded(results[name], part) for name, part in parts.items() if part is not None}


def _worded(found: Mapping[str, Any], part: PaperPart) -> dict[str, Any]:
    said = {row.name: row for row in part.rows}

    def words(row: Mapping[str, Any]) -> dict[str, Any]:
        now = said[row["name"]]
        paper = paper_value(now, row["kind"])
        word = outcome(now, row["kind"], paper, row["ours"], part.reading)
        told = {key: getattr(now, key) for key in ("note", "explains", "formula", "claim")}
        return {**told, "paper": paper, "outcome": word}

    rows = [{**row, **words(row)} for row in found["rows"] if row["name"] in said]
    return {**found, "reading": part.reading, "rows": rows}


def shown(folder: Path) -> dict[str, Any]:
    """Return, by scenario, what the documentation in a folder shows. Raises `InputError`."""
    return worded(listed(folder), kept(folder))


def keep(folder: Path, found: Mapping[str, Any]) -> None:
    """Add what came of scenarios, by their names, to what is kept, and write the documentation's tables again.

    What is no longer listed goes. Raises `InputError`.
    """
    known = {each.scenario for each in listed(folder)}
    results = {name: each for name, each in (kept(folder) | dict(found)).items() if name in known}
    text = json.dumps(dict(sorted(results.items())), indent=1, ensure_ascii=False) + "\n"
    (folder / RESULTS).write_text(text, encoding="utf-8")
    page = folder / PAGE
    page.write_text(written(page.read_text(encoding="utf-8"), shown(folder)), encoding="utf-8")


def written(page: str, results: Mapping[str, Any]) -> str:
    """Return the page with each table, between its two comments, as the results with their words have it."""

    explained = _explained(results)

    def section(match: re.Match[str]) -> str:
        name = match[1]
        body = _section(results[name], explained.get(name, {})) if name in results else match[2]
        return f"<!-- papers: {name} -->\n{body}<!-- end -->"

    return re.sub(r"<!-- papers: ([a-z0-9-]+) -->\n(.*?)<!-- end -->", section, page, flags=re.DOTALL)


def rows_of(found: Mapping[str, Any]) -> list[ReproducedRow]:
    """Return the rows of a scenario that was run, given with its words."""
    names = {field.name for field in fields(ReproducedRow)}
    return [ReproducedRow(**{key: value for key, value in row.items() if key in names}) for row in found["rows"]]


def _explained(results: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return, by scenario and row, by which row a figure comes out that does not there."""
    found: dict[str, dict[str, str]] = {}
    for scenario, kept in results.items():
        for row in rows_of(kept):
            if row.explains and row.outcome is not None and not row.missed:
                other, _, name = row.explains.partition(": ")
                place = (other, name) if other in results else (scenario, row.explains)
                by = row.name if place[0] == scenario else f"{scenario}: {row.name}"
                found.setdefault(place[0], {})[place[1]] = by
    return found


def _section(found: Mapping[str, Any], explained: Mapping[str, str]) -> str:
    seeds = ", ".join(map(str, found["seeds"]))
    reading = [f"Reading: {found['reading']}", ""] if found["reading"] else []
    runs = f"{found['runs']} run{'s' if found['runs'] > 1 else ''}"
    took = f" that took {formats.seconds(found['seconds'])} one after the other" if found.get("seconds") else ""
    where = f", on {kernels.named(found['computing'])}" if found.get("computing") else ""
    about = f"{runs}{took}, seeds {seeds}, {found['date']}, revision {str(found['revision'])[:7]}{where}."
    rows = [
        replace(row, note="; ".join(filter(None, (f"comes out as '{by}'", row.note)))) if by else row
        for row in rows_of(found)
        for by in [explained.get(row.name) if row.missed else None]
    ]
    return "\n".join([f"    {found['command']}", "", *reading, *table(rows), "", about, ""])


def stale(entries: Sequence[Entry], results: Mapping[str, Any]) -> list[Entry]:
    """Return those that were not run as their scenario and its changes are now."""
    return [each for each in entries if results.get(each.scenario, {}).get("digest") != each.digest()]
