"""From a scenario to experiments: sweeps and repetitions, devices one by one, links one direction at a time."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from testbed.common.errors import Diagnostic, InputError, Key, nearest, parse_key
from testbed.common.seeds import derive
from testbed.experiment import Experiment
from testbed.faults.script import Change
from testbed.hardware import PROFILES, DeviceSpec, Machine, Profile, Rates
from testbed.network import checks
from testbed.network.checks import rate_problem
from testbed.network.link import Cell, Link, Pair, directed_pairs
from testbed.network.parts import PRESETS, LinkPart, overlay
from testbed.network.radio import Radio
from testbed.scenario import paper
from testbed.scenario.loading import parse, put, read_keys, validate
from testbed.scenario.points import LABEL, plain_value
from testbed.scenario.radio import radio
from testbed.scenario.schema import DevicePart, ProfilePart, Scenario, Trial
from testbed.scenario.trace import changes

_MAX_NAME = 31
MAX_RUNS = 10_000
"""Runs of one scenario: they are all checked before the first begins."""
MAX_DEVICES = 20_000
MAX_LINKS = 2_000_000
"""Directed links, as many as those of a mesh of 1,400 devices."""


def trials(scenario: Scenario) -> list[Trial]:
    """Return every run that the scenario asks for: each point of its sweep and beside it, each repetition of each.

    The first repetition has the scenario's own seed, later ones seeds derived from it; all points of a sweep
    share them, so that they differ in nothing but the swept keys. Raises `InputError` naming file and line.
    """
    _check_points(scenario)
    # Of a run that was kept neither sweep nor points are left.
    points = [point for _, point in swept(scenario)] if scenario.sweep or scenario.points else None
    wrong = list(paper.problems(scenario.paper, points))
    if wrong:
        raise scenario.source.error(wrong)
    return [
        _trial(point, values, repetition)
        for point, values in _points(scenario)
        for repetition in range(scenario.repetitions)
    ]


def _check_points(scenario: Scenario) -> None:
    """Refuse points that cannot be, and more runs than anybody waits for, before any of them is made."""
    problems = [problem for axes in _sweeps(scenario) for problem in _sweep_problems(axes)]
    problems += [
        Diagnostic(("points", index), "sets no key")
        for index, point in enumerate(scenario.points)
        if not set(point) - {LABEL}
    ]
    if problems:
        raise scenario.source.error(problems)
    swept_points = sum(math.prod(max(map(len, axis.values())) for _, axis in axes) for axes in _sweeps(scenario))
    points = len(scenario.points) + (swept_points if scenario.sweep or not scenario.points else 0)
    if points * scenario.repetitions > MAX_RUNS:
        key = "repetitions" if scenario.repetitions > points else "sweep" if scenario.sweep else "points"
        text = f"there would be {points * scenario.repetitions:,} runs, more than {MAX_RUNS:,}: use fewer"
        raise scenario.source.error([Diagnostic((key,), text)])


def _points(scenario: Scenario) -> Iterator[tuple[Scenario, dict[str, object]]]:
    source = scenario.source
    plain = scenario.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"sweep", "points", "paper"})
    for written, point in swept(scenario):
        if not point:
            yield scenario, {}
            return
        # What a paper has is of no point, and may be long: neither copied nor checked again.
        tree: dict[str, Any] = {**copy.deepcopy(plain), "paper": scenario.paper}
        places = {}
        for dotted, labelled in point.items():
            if dotted == LABEL:
                continue
            value = plain_value(labelled)
            where = source.where(written[dotted])
            put(tree, parse_key(dotted), value, where)
            places[parse_key(dotted)] = f"{where} ({written[dotted][0]}: {value})"
        yield validate(tree, source.override(places)), point


def swept(scenario: Scenario) -> Iterator[tuple[dict[str, Key], dict[str, object]]]:
    """Yield where each key is written, and each point: all combinations of the sweep and then the further points."""
    if scenario.sweep or not scenario.points:
        for axes in _sweeps(scenario):
            written = {key: (*place, key) for place, axis in axes for key in axis}
            steps = [
                [dict(zip(axis, values, strict=True)) for values in zip(*axis.values(), strict=True)]
                for _, axis in axes
            ]
            for chosen in itertools.product(*steps):
                yield written, {key: value for step in chosen for key, value in step.items()}
    for index, point in enumerate(scenario.points):
        yield {key: ("points", index, key) for key in point}, dict(point)


def _sweeps(scenario: Scenario) -> Iterator[list[tuple[Key, Mapping[str, Sequence[Any]]]]]:
    """Yield the axes of each sweep: keys whose values change together, mostly one, and where they are written."""
    sweeps = (
        {("sweep",): scenario.sweep}
        if isinstance(scenario.sweep, Mapping)
        else {("sweep", index): sweep for index, sweep in enumerate(scenario.sweep)}
    )
    for place, sweep in sweeps.items():
        yield [
            ((*place, key), values) if isinstance(values, Mapping) else (place, {key: values})
            for key, values in sweep.items()
        ]


def _sweep_problems(axes: Sequence[tuple[Key, Mapping[str, Sequence[Any]]]]) -> Iterator[Diagnostic]:
    """Yield what is wrong with the axes of one sweep."""
    known: set[str] = set()
    for place, axis in axes:
        first = next(iter(axis), "")
        for key, values in axis.items():
            if not values:
                yield Diagnostic((*place, key), "has no values")
            elif len(values) != len(axis[first]):
                text = f"needs as many values as '{first}', {len(axis[first])}, and has {len(values)}"
                yield Diagnostic((*place, key), text)
            elif key in known:
                yield Diagnostic((*place, key), "is swept twice: leave one of the two out")
            known.add(key)


def _with_profiles(scenario: Scenario) -> Scenario:
    """Return the scenario with the profiles that it names by their files in it, so that it needs the files no more."""
    devices = {}
    for name, part in scenario.devices.items():
        if isinstance(part.profile, str) and part.profile.endswith((".yaml", ".yml")):
            try:
                found = _read_profile(scenario.source.folder / part.profile, part.profile)
                part = part.model_copy(update={"profile": found})
            except InputError as error:
                raise scenario.source.error([Diagnostic(("devices", name, "profile"), str(error))]) from None
        devices[name] = part
    return scenario.model_copy(update={"devices": devices})


def _read_profile(file: Path, name: str) -> ProfilePart:
    return parse(ProfilePart, {"name": name, **read_keys(file)})


def profiled(file: Path) -> DeviceSpec:
    """Return a device with the profile of a file; raises `InputError`."""
    return _device(file.name, DevicePart(), _profile(_read_profile(file, file.name)))


def _profile(part: ProfilePart) -> Profile:
    watts = None if part.watts is None else (part.watts.idle, part.watts.busy)
    return Profile(
        name=part.name,
        speed=part.speed,
        memory=part.memory,
        basis="measured",
        source=part.name,
        processors=part.processors,
        memory_rate=part.memory_rate,
        kinds={kind: Rates(each.speed, each.memory_rate, each.weight_rate) for kind, each in part.kinds.items()},
        watts=watts,
        precisions=part.precisions,
    )


def _trial(scenario: Scenario, point: dict[str, object], repetition: int) -> Trial:
    scenario = _with_profiles(scenario)
    devices = _devices(scenario)
    names = [device.name for device in devices]
    seed = scenario.seed if repetition == 0 else derive(scenario.seed, "repetition", repetition)
    air = radio(scenario, names, seed)
    links = _links(scenario, names, air)
    single = scenario.model_copy(update={"sweep": {}, "points": (), "repetitions": 1, "seed": seed})
    experiment = Experiment(
        name=scenario.name,
        seed=seed,
        workload=scenario.workload,
        devices=devices,
        links=links,
        time_limit=scenario.time_limit,
        faults=scenario.faults,
        cells=_cells(scenario, names),
        changes=_changes(scenario, devices, links),
        radio=air,
        machines=_machines(scenario, names),
    )
    return Trial(single, experiment, point, repetition)


def _devices(scenario: Scenario) -> tuple[DeviceSpec, ...]:
    devices: dict[str, DeviceSpec] = {}
    problems = []
    total = sum(part.count or 1 for part in scenario.devices.values())
    mesh = scenario.network.topology == "mesh"
    if total > MAX_DEVICES or (mesh and total * (total - 1) > MAX_LINKS):
        most = f"{MAX_LINKS:,} links, as in a mesh of 1,400" if mesh else f"{MAX_DEVICES:,}"
        text = f"are {total:,}, more than {most}: use fewer" + (", or the topology star" if mesh else "")
        raise scenario.source.error([Diagnostic(("devices",), text)])
    for name, part in scenario.devices.items():
        key: Key = ("devices", name)
        named = part.profile
        profile = PROFILES.get(named) if isinstance(named, str) else _profile(named)
        if profile is None:
            text = f"there is no profile '{named}': {nearest(str(named), PROFILES)}"
            problems.append(Diagnostic((*key, "profile"), text))
            continue
        if part.precision not in ("f32", "int8", *profile.precisions) and part.speed is None:
            text = f"no speed in {part.precision} is known of {profile.name}: give `speed`, measured in that precision"
            problems.append(Diagnostic((*key, "precision"), text))
        if part.gpu and scenario.workload.task != "program":
            text = (
                "is for programs of one's own: methods compute on processors, at the rates of the profile, which may "
            )
            problems.append(Diagnostic((*key, "gpu"), text + "be those of a GPU by kinds of layers: leave it out"))
        problems += _device_problems(part, key)
        names = device_names(name, part)
        if len(names[-1]) > _MAX_NAME:
            problems.append(Diagnostic(key, f"'{names[-1]}' is longer than {_MAX_NAME} characters: shorten the name"))
        for each in names:
            if each in devices:
                problems.append(Diagnostic(key, f"makes a second device called '{each}': rename one of the two"))
            devices[each] = _device(each, part, profile)
    if problems:
        raise scenario.source.error(problems)
    return tuple(devices.values())


def _device(name: str, part: DevicePart, profile: Profile) -> DeviceSpec:
    """Return what the scenario says of a device, and the profile of the rest."""
    access = PRESETS.get(part.access or "")
    return DeviceSpec(
        name=name,
        speed=part.speed if part.speed is not None else profile.speed,
        memory=part.memory if part.memory is not None else profile.memory,
        cpus=part.cpus,
        profile=profile.name,
        uplink=part.uplink if access is None or part.uplink is not None else access.up,
        downlink=part.downlink if access is None or part.downlink is not None else access.down,
        slowdown=part.slowdown,
        memory_rate=part.memory_rate if part.memory_rate is not None else profile.memory_rate,
        kinds=profile.kinds if part.speed is None and part.memory_rate is None else {},
        processors=part.processors if part.processors is not None else profile.processors,
        precision=part.precision,
        faster=1.0 if part.speed is not None else profile.precisions.get(part.precision, profile.speed) / profile.speed,
        gpu=part.gpu,
        watts=profile.watts if part.watts is None else (part.watts.idle, part.watts.busy),
    )


def device_names(name: str, part: DevicePart) -> list[str]:
    """Return the devices that one part of the scenario makes."""
    return [name] if part.count is None else [f"{name}{number}" for number in range(1, part.count + 1)]


def _device_problems(part: DevicePart, key: Key) -> Iterator[Diagnostic]:
    yield from _preset_problems(part.access, (*key, "access"))
    for access in ("uplink", "downlink"):
        rate = getattr(part, access)
        if rate is not None and (wrong := rate_problem(rate)):
            yield Diagnostic((*key, access), wrong)
    if part.slowdown is not None and part.speed is None:
        text = "the host's own speed is not known when plans are made: give the speed to reckon with as well"
        yield Diagnostic((*key, "slowdown"), text)


def _links(scenario: Scenario, names: list[str], air: Radio | None) -> dict[Pair, Link]:
    network = scenario.network
    pairs = dict.fromkeys(directed_pairs(network.topology, names))
    problems = _preset_problems(network.link.preset, ("network", "link", "preset"))
    for index, part in enumerate(network.links):
        key: Key = ("network", "links", index)
        found = [Diagnostic((*key, *end), text) for end, text in no_such_devices(part.ends(), scenario, names)]
        problems += _preset_problems(part.preset, (*key, "preset")) + found
        sender, receiver = part.directions()[0]
        if found:
            continue
        if sender == receiver:
            problems.append(Diagnostic(key, f"links '{sender}' to itself: name two devices"))
        elif network.topology == "explicit":
            pairs |= dict.fromkeys([(sender, receiver), (receiver, sender)])
        elif (sender, receiver) not in pairs:
            text = f"a {network.topology} has no link between '{sender}' and '{receiver}': "
            problems.append(Diagnostic(key, text + "use the topology mesh, or explicit and list every link"))
    if problems:
        raise scenario.source.error(problems)
    return _with_figures(pairs, names[0], scenario, air)


def _with_figures(pairs: Iterable[Pair], first: str, scenario: Scenario, air: Radio | None) -> dict[Pair, Link]:
    """Return the link of each pair, its figures from all levels; every name is known to be right.

    What a radio loses stands between the default of all links and those that differ.
    """
    network = scenario.network
    # Two values shared by all pairs: a mesh of a thousand devices has a million of them.
    plain = Link(frame=None if network.frame is None else int(network.frame))
    default = {from_first: overlay(plain, network.link, from_first) for from_first in (True, False)}
    links = {pair: default[pair[0] == first] for pair in pairs}
    if air is not None:
        links = {pair: replace(link, message_loss=1 - air.reception_ratio(pair)) for pair, link in links.items()}
    problems = [
        problem
        for link in dict.fromkeys(default.values())
        for problem in located_problems(link, network.link, ("network", "link"))
    ]
    differing: dict[Pair, int] = {}
    for index, part in enumerate(network.links):
        for pair in part.directions():
            links[pair] = overlay(links[pair], part, pair[0] == first)
            differing[pair] = index
    for pair, index in differing.items():
        problems += located_problems(links[pair], network.links[index], ("network", "links", index))
    if problems:
        raise scenario.source.error(problems)
    return links


def located_problems(link: Link, part: LinkPart, key: Key) -> Iterator[Diagnostic]:
    """Yield what no backend can do of a link, at the part of the scenario that decided about it last."""
    found = checks.problems(link)
    if part.distribution is not None and link.jitter == 0 and not found:
        found.append(checks.Impossible("distribution", checks.no_jitter(part.distribution)))
    for figure, text in found:
        inner = parse_key(figure)
        yield Diagnostic((*key, *inner) if getattr(part, str(inner[0])) is not None else key, text)


def _members(
    scenario: Scenario, given: Sequence[str], names: list[str], key: Key, problems: list[Diagnostic]
) -> list[str]:
    """Return the devices that a list of names stands for, all where it is empty; add what is wrong to the problems."""
    members: list[str] = []
    for place, name in enumerate(given):
        if name in scenario.devices:
            members += device_names(name, scenario.devices[name])
        elif name in names:
            members.append(name)
        else:
            text = f"there is no device '{name}': {nearest(name, [*scenario.devices, *names])}"
            problems.append(Diagnostic((*key, "devices", place), text))
    return list(dict.fromkeys(members if given else names))


def _machines(scenario: Scenario, names: list[str]) -> tuple[Machine, ...]:
    machines: list[Machine] = []
    problems: list[Diagnostic] = []
    for index, part in enumerate(scenario.machines):
        members = _members(scenario, part.devices, names, ("machines", index), problems)
        for name in sorted({name for machine in machines for name in machine.devices} & set(members)):
            text = f"'{name}' is on another machine already: name each device once"
            problems.append(Diagnostic(("machines", index, "devices"), text))
        machines.append(Machine(tuple(members), part.cores))
    if problems:
        raise scenario.source.error(problems)
    return tuple(machines)


def _cells(scenario: Scenario, names: list[str]) -> tuple[Cell, ...]:
    cells: list[Cell] = []
    problems: list[Diagnostic] = []
    for index, part in enumerate(scenario.network.cells):
        key: Key = ("network", "cells", index)
        members = _members(scenario, part.devices, names, key, problems)
        if len(members) < 2 and not problems:
            problems.append(Diagnostic((*key, "devices"), "a cell of one device carries nothing: name at least two"))
        if wrong := rate_problem(part.rate):
            problems.append(Diagnostic((*key, "rate"), wrong))
        for other, cell in enumerate(cells):
            shared = [name for name in members if name in cell.devices]
            if len(shared) > 1:
                text = f"'{shared[0]}' and '{shared[1]}' are both in cell {other} as well: a pair has one channel"
                problems.append(Diagnostic((*key, "devices"), text + ", leave one of them out of a cell"))
        cells.append(Cell(tuple(members), part.rate))
    if problems:
        raise scenario.source.error(problems)
    return tuple(cells)


def _preset_problems(preset: str | None, key: Key) -> list[Diagnostic]:
    if preset is None or preset in PRESETS:
        return []
    return [Diagnostic(key, f"there is no preset '{preset}': {nearest(preset, PRESETS)}")]


def _changes(scenario: Scenario, devices: Sequence[DeviceSpec], links: dict[Pair, Link]) -> tuple[Change, ...]:
    names = {device.name: None for device in devices}

    def wrong(name: str) -> str | None:
        return None if name in names else next(no_such_devices([((), name)], scenario, names))[1]

    assert not isinstance(scenario.trace, str), "loading has put the file's lines in its place"
    found, problems = changes(scenario.trace, devices, links, wrong)
    if problems:
        raise scenario.source.error(problems)
    return found


def no_such_devices(
    named: Iterable[tuple[Key, str]], scenario: Scenario, names: Collection[str]
) -> Iterator[tuple[Key, str]]:
    """Yield (key, what is wrong) for each named device that the scenario does not have."""
    for key, name in named:
        if name in names:
            continue
        part = scenario.devices.get(name)
        if part is not None and part.count is not None:
            last = f" to {name}{part.count}" if part.count > 1 else ""
            yield key, f"'{name}' stands for the devices {name}1{last}: name one of them"
        else:
            yield key, f"there is no device '{name}': {nearest(name, names)}"
