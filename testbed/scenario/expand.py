"""Expansion of a scenario to trials: points of the sweep, repetitions, single devices and directed links.

Each section of the scenario is checked against the others here. The names in these functions are device names, in the
order of the scenario, after groups (``count``) have been expanded.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from testbed.common.errors import Diagnostic, Key, nearest, parse_key
from testbed.common.seeds import derive
from testbed.experiment import Experiment
from testbed.faults.script import Change
from testbed.hardware import DeviceSpec, Machine
from testbed.network import checks
from testbed.network.checks import rate_problem
from testbed.network.link import Cell, Link, Pair, directed_pairs
from testbed.network.parts import LinkPart, NetworkPart, overlay
from testbed.network.radio import Radio
from testbed.scenario.devices import (
    device_names,
    expand_devices,
    preset_problems,
    with_profiles,
)
from testbed.scenario.link_trace import parse_trace
from testbed.scenario.loading import set_value, validate
from testbed.scenario.points import LABEL, plain_value
from testbed.scenario.radio import build_radio
from testbed.scenario.schema import Scenario, Trial
from testbed.scenario.sweeps import check_points, sweep_points


def trials(scenario: Scenario) -> list[Trial]:
    """Return all trials of a scenario: each repetition of each sweep point.

    The first repetition has the scenario's own seed, later ones have seeds derived from it. All points of a sweep
    share the seeds, so that they differ in nothing but the swept keys. Raises `InputError` naming file and line.
    """
    check_points(scenario)
    expanded = []
    for scenario_of_point, point in _expand_points(scenario):
        for repetition in range(scenario.repetitions):
            expanded.append(_make_trial(scenario_of_point, point, repetition))
    return expanded


def repetition_seed(seed: int, repetition: int) -> int:
    """Return the seed of a repetition of a scenario with the given seed.

    >>> repetition_seed(7, 0), repetition_seed(7, 1) == repetition_seed(7, 2)
    (7, False)
    """
    return derive(seed, "repetition", repetition) if repetition > 0 else seed


def _expand_points(scenario: Scenario) -> Iterator[tuple[Scenario, dict[str, object]]]:
    """Yield the scenario of each point, with the values of the point set, and these values by dotted key."""
    source = scenario.source
    plain = scenario.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude={"sweep", "points"}
    )
    for places, point in sweep_points(scenario):
        # A scenario without a sweep has one point without values: itself.
        if not point:
            yield scenario, {}
            return
        tree: dict[str, Any] = copy.deepcopy(plain)
        origins = {}
        for dotted, value_or_labelled in point.items():
            if dotted == LABEL:
                continue
            value = plain_value(value_or_labelled)
            where = source.where(places[dotted])
            key = parse_key(dotted)
            set_value(tree, key, value, where)
            # An error of a swept value is located in the sweep, with the value of the point.
            origins[key] = f"{where} ({places[dotted][0]}: {value})"
        yield validate(tree, source.override(origins)), point


def _make_trial(scenario: Scenario, point: dict[str, object], repetition: int) -> Trial:
    # The contents of profile files are included, so that the trial can be prepared again on another host.
    scenario = with_profiles(scenario)
    devices = expand_devices(scenario)
    names = [device.name for device in devices]
    seed = repetition_seed(scenario.seed, repetition)
    radio = build_radio(scenario, names, seed)
    links = _expand_links(scenario, names, radio)
    scenario_of_trial = scenario.model_copy(
        update={"sweep": {}, "points": (), "repetitions": 1, "seed": seed}
    )
    experiment = Experiment(
        name=scenario.name,
        seed=seed,
        workload=scenario.workload,
        devices=devices,
        links=links,
        time_limit=scenario.time_limit,
        faults=scenario.faults,
        cells=_expand_cells(scenario, names),
        changes=_expand_changes(scenario, devices, links),
        radio=radio,
        machines=_expand_machines(scenario, names),
    )
    return Trial(scenario_of_trial, experiment, point, repetition)


def _expand_links(
    scenario: Scenario, names: list[str], radio: Radio | None
) -> dict[Pair, Link]:
    network = scenario.network
    pairs = dict.fromkeys(directed_pairs(network.topology, names))
    problems = preset_problems(network.link.preset, ("network", "link", "preset"))
    for index, part in enumerate(network.links):
        key: Key = ("network", "links", index)
        problems += preset_problems(part.preset, (*key, "preset"))
        has_unknown_end = False
        for end, name in part.ends():
            unknown = unknown_device_text(name, scenario, names)
            if unknown is not None:
                problems.append(Diagnostic((*key, *end), unknown))
                has_unknown_end = True
        if has_unknown_end:
            continue
        sender, receiver = part.directions()[0]
        if sender == receiver:
            text = f"links '{sender}' to itself: name two devices"
            problems.append(Diagnostic(key, text))
        elif network.topology == "explicit":
            # Both directions exist, since acknowledgements need the way back.
            pairs |= dict.fromkeys([(sender, receiver), (receiver, sender)])
        elif (sender, receiver) not in pairs:
            text = f"a {network.topology} has no link between '{sender}' and '{receiver}': "
            text += "use the topology mesh, or explicit and list every link"
            problems.append(Diagnostic(key, text))
    if problems:
        raise scenario.source.error(problems)
    return _with_properties(pairs, names[0], scenario, radio)


def _with_properties(
    pairs: Iterable[Pair], first_device: str, scenario: Scenario, radio: Radio | None
) -> dict[Pair, Link]:
    """Return the link of each pair, combining `network.link`, the radio and the entries of `network.links`."""
    network = scenario.network
    # Two values shared by all pairs: a mesh of a thousand devices has a million pairs.
    default_links = _default_links(network)
    links = {pair: default_links[pair[0] == first_device] for pair in pairs}
    if radio is not None:
        for pair, link in links.items():
            links[pair] = replace(link, message_loss=1 - radio.reception_ratio(pair))
    problems: list[Diagnostic] = []
    for link in dict.fromkeys(default_links.values()):
        problems += located_problems(link, network.link, ("network", "link"))
    last_entries: dict[Pair, int] = {}
    for index, part in enumerate(network.links):
        for pair in part.directions():
            is_from_first = pair[0] == first_device
            links[pair] = overlay(links[pair], part, is_from_first)
            last_entries[pair] = index
    # Each link is checked once, and its problems are reported at the entry that changed it last.
    for pair, index in last_entries.items():
        key: Key = ("network", "links", index)
        problems += located_problems(links[pair], network.links[index], key)
    if problems:
        raise scenario.source.error(problems)
    return links


def _default_links(network: NetworkPart) -> dict[bool, Link]:
    """Return the link of `network.link` by direction: True away from the first device, False otherwise.

    The directions differ if a preset has different rates for uploads and downloads.
    """
    plain = Link(frame=None if network.frame is None else int(network.frame))
    return {
        True: overlay(plain, network.link, is_from_first=True),
        False: overlay(plain, network.link, is_from_first=False),
    }


def located_problems(link: Link, part: LinkPart, key: Key) -> Iterator[Diagnostic]:
    """Yield the problems of a link, located in the section ``part`` at ``key``, the last one to change the link."""
    link_problems = checks.problems(link)
    # `normal` is the default, so only the section shows whether the user asked for it.
    if part.distribution is not None and link.jitter == 0 and not link_problems:
        text = checks.no_jitter_text(part.distribution)
        link_problems.append(checks.LinkProblem("distribution", text))
    for name, text in link_problems:
        inner = parse_key(name)
        is_set_here = getattr(part, str(inner[0])) is not None
        yield Diagnostic((*key, *inner) if is_set_here else key, text)


def _named_devices(
    scenario: Scenario,
    requested: Sequence[str],
    names: list[str],
    key: Key,
    problems: list[Diagnostic],
) -> list[str]:
    """Return the devices in a list of device and group names; all devices for an empty list.

    ``key`` is the entry of the scenario that has the list under ``devices``. Unknown names are added to ``problems``.
    """
    members: list[str] = []
    for place, name in enumerate(requested):
        # The name of a group comes first: a group may have the name of another group's device.
        if name in scenario.devices:
            members += device_names(name, scenario.devices[name])
        elif name in names:
            members.append(name)
        else:
            text = (
                f"unknown device '{name}': {nearest(name, [*scenario.devices, *names])}"
            )
            problems.append(Diagnostic((*key, "devices", place), text))
    return list(dict.fromkeys(members if requested else names))


def _expand_machines(scenario: Scenario, names: list[str]) -> tuple[Machine, ...]:
    machines: list[Machine] = []
    problems: list[Diagnostic] = []
    for index, part in enumerate(scenario.machines):
        key: Key = ("machines", index)
        members = _named_devices(scenario, part.devices, names, key, problems)
        for machine in machines:
            for name in sorted({*machine.devices} & {*members}):
                text = f"'{name}' is already placed on another machine: name each device once"
                problems.append(Diagnostic((*key, "devices"), text))
        machines.append(Machine(tuple(members), part.cores))
    if problems:
        raise scenario.source.error(problems)
    return tuple(machines)


def _expand_cells(scenario: Scenario, names: list[str]) -> tuple[Cell, ...]:
    cells: list[Cell] = []
    problems: list[Diagnostic] = []
    for index, part in enumerate(scenario.network.cells):
        key: Key = ("network", "cells", index)
        members = _named_devices(scenario, part.devices, names, key, problems)
        if len(members) < 2 and not problems:
            problems.append(
                Diagnostic((*key, "devices"), "a cell requires at least two devices")
            )
        problem = rate_problem(part.rate)
        if problem is not None:
            problems.append(Diagnostic((*key, "rate"), problem))
        for other_index, cell in enumerate(cells):
            # One common device is allowed: a gateway between two channels.
            shared = [name for name in members if name in cell.devices]
            if len(shared) > 1:
                text = f"'{shared[0]}' and '{shared[1]}' are both in cell {other_index} as well: "
                text += "a pair has one channel, remove one of them from a cell"
                problems.append(Diagnostic((*key, "devices"), text))
        cells.append(Cell(tuple(members), part.rate))
    if problems:
        raise scenario.source.error(problems)
    return tuple(cells)


def _expand_changes(
    scenario: Scenario, devices: Sequence[DeviceSpec], links: dict[Pair, Link]
) -> tuple[Change, ...]:
    """Parse the scenario's link trace."""
    assert not isinstance(scenario.trace, str), "`loading` has read the named file"
    changes, problems = parse_trace(
        scenario.trace,
        devices,
        links,
        partial(
            unknown_device_text,
            scenario=scenario,
            names=[device.name for device in devices],
        ),
    )
    if problems:
        raise scenario.source.error(problems)
    return changes


def unknown_device_text(
    name: str, scenario: Scenario, names: Collection[str]
) -> str | None:
    """Return the error text for a name missing in ``names``, the devices of the scenario; None for a device."""
    if name in names:
        return None
    part = scenario.devices.get(name)
    if part is None or part.count is None:
        return f"unknown device '{name}': {nearest(name, names)}"
    last = f" to {name}{part.count}" if part.count > 1 else ""
    return f"'{name}' is a group of devices, {name}1{last}: name one of them"
