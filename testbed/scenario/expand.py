"""From a scenario to experiments: points of sweeps, repetitions, and links one direction at a time."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
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
    """Return all runs of a scenario: each repetition of each sweep point.

    The first repetition has the scenario's own seed, later ones have seeds derived from it. All points of a sweep
    share the seeds, so that they differ in nothing but the swept keys. Raises `InputError` naming file and line.
    """
    check_points(scenario)
    runs = []
    for point, values in _expand_points(scenario):
        for repetition in range(scenario.repetitions):
            runs.append(_make_trial(point, values, repetition))
    return runs


def repetition_seed(seed: int, repetition: int) -> int:
    """Return the seed of a repetition of a scenario with the given seed.

    >>> repetition_seed(7, 0), repetition_seed(7, 1) == repetition_seed(7, 2)
    (7, False)
    """
    return derive(seed, "repetition", repetition) if repetition > 0 else seed


def _expand_points(scenario: Scenario) -> Iterator[tuple[Scenario, dict[str, object]]]:
    source = scenario.source
    plain = scenario.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude={"sweep", "points"}
    )
    for written, point in sweep_points(scenario):
        # A scenario without a sweep has one point without values: itself.
        if not point:
            yield scenario, {}
            return
        tree: dict[str, Any] = copy.deepcopy(plain)
        places = {}
        for dotted, labelled in point.items():
            if dotted == LABEL:
                continue
            value = plain_value(labelled)
            where = source.where(written[dotted])
            key = parse_key(dotted)
            set_value(tree, key, value, where)
            # An error of a swept value is located in the sweep, with the value of the point.
            places[key] = f"{where} ({written[dotted][0]}: {value})"
        yield validate(tree, source.override(places)), point


def _make_trial(scenario: Scenario, point: dict[str, object], repetition: int) -> Trial:
    # Profiles of files are included, so that the trial can be prepared again on another host.
    scenario = with_profiles(scenario)
    devices = expand_devices(scenario)
    names = [device.name for device in devices]
    seed = repetition_seed(scenario.seed, repetition)
    radio = build_radio(scenario, names, seed)
    links = _expand_links(scenario, names, radio)
    single = scenario.model_copy(
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
    return Trial(single, experiment, point, repetition)


def _expand_links(
    scenario: Scenario, names: list[str], radio: Radio | None
) -> dict[Pair, Link]:
    network = scenario.network
    pairs = dict.fromkeys(directed_pairs(network.topology, names))
    problems = preset_problems(network.link.preset, ("network", "link", "preset"))
    for index, part in enumerate(network.links):
        key: Key = ("network", "links", index)
        problems += preset_problems(part.preset, (*key, "preset"))
        unknown = list(no_such_devices(part.ends(), scenario, names))
        for end, text in unknown:
            problems.append(Diagnostic((*key, *end), text))
        sender, receiver = part.directions()[0]
        if unknown:
            continue
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
    pairs: Iterable[Pair], first: str, scenario: Scenario, radio: Radio | None
) -> dict[Pair, Link]:
    """Return the link of each pair, combining the defaults, the radio and the individual links."""
    network = scenario.network
    # Two values shared by all pairs: a mesh of a thousand devices has a million of them.
    default = _default_links(network)
    links = {pair: default[pair[0] == first] for pair in pairs}
    if radio is not None:
        for pair, link in links.items():
            links[pair] = replace(link, message_loss=1 - radio.reception_ratio(pair))
    problems: list[Diagnostic] = []
    for link in dict.fromkeys(default.values()):
        problems += located_problems(link, network.link, ("network", "link"))
    differing: dict[Pair, int] = {}
    for index, part in enumerate(network.links):
        for pair in part.directions():
            links[pair] = overlay(links[pair], part, pair[0] == first)
            differing[pair] = index
    # Each link once, at the entry that changed it last.
    for pair, index in differing.items():
        key: Key = ("network", "links", index)
        problems += located_problems(links[pair], network.links[index], key)
    if problems:
        raise scenario.source.error(problems)
    return links


def _default_links(network: NetworkPart) -> dict[bool, Link]:
    """Return the default link by direction: away from the first device, or not."""
    plain = Link(frame=None if network.frame is None else int(network.frame))
    return {
        True: overlay(plain, network.link, is_from_first=True),
        False: overlay(plain, network.link, is_from_first=False),
    }


def located_problems(link: Link, part: LinkPart, key: Key) -> Iterator[Diagnostic]:
    """Yield the unsupported properties of a link, at the part of the scenario that set each last."""
    impossible = checks.problems(link)
    # `normal` is the default, so only the part shows that it was asked for.
    if part.distribution is not None and link.jitter == 0 and not impossible:
        text = checks.no_jitter(part.distribution)
        impossible.append(checks.Impossible("distribution", text))
    for name, text in impossible:
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
    """Return the devices of a list of names (all for an empty list); report invalid names."""
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
        wrong = rate_problem(part.rate)
        if wrong is not None:
            problems.append(Diagnostic((*key, "rate"), wrong))
        for other, cell in enumerate(cells):
            # One common device is a gateway between two channels.
            shared = [name for name in members if name in cell.devices]
            if len(shared) > 1:
                text = f"'{shared[0]}' and '{shared[1]}' are both in cell {other} as well: a pair has one channel"
                text += ", remove one of them from a cell"
                problems.append(Diagnostic((*key, "devices"), text))
        cells.append(Cell(tuple(members), part.rate))
    if problems:
        raise scenario.source.error(problems)
    return tuple(cells)


def _expand_changes(
    scenario: Scenario, devices: Sequence[DeviceSpec], links: dict[Pair, Link]
) -> tuple[Change, ...]:
    names = [device.name for device in devices]

    def unknown_device_text(name: str) -> str | None:
        for _, text in no_such_devices([((), name)], scenario, names):
            return text
        return None

    assert not isinstance(scenario.trace, str), (
        "loading has put the file's lines in its place"
    )
    changes, problems = parse_trace(scenario.trace, devices, links, unknown_device_text)
    if problems:
        raise scenario.source.error(problems)
    return changes


def no_such_devices(
    named: Iterable[tuple[Key, str]], scenario: Scenario, names: Collection[str]
) -> Iterator[tuple[Key, str]]:
    """Yield (key, message) for each unknown device name."""
    for key, name in named:
        if name in names:
            continue
        part = scenario.devices.get(name)
        if part is not None and part.count is not None:
            last = f" to {name}{part.count}" if part.count > 1 else ""
            yield (
                key,
                f"'{name}' is a group of devices, {name}1{last}: name one of them",
            )
        else:
            yield key, f"unknown device '{name}': {nearest(name, names)}"
