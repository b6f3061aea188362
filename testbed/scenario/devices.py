"""Expansion of the `devices` section to single devices with profiles and overrides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from testbed.common.errors import Diagnostic, InputError, Key, nearest
from testbed.hardware import PROFILES, DeviceSpec, Profile, Rates
from testbed.network.checks import rate_problem
from testbed.network.parts import PRESETS
from testbed.scenario.loading import parse, read_keys
from testbed.scenario.schema import DevicePart, ProfilePart, Scenario

_MAX_NAME = 31
"""Maximum number of characters of a device's name, which becomes part of container and host names."""
MAX_DEVICES = 20_000
"""Maximum number of devices of a scenario, simulated ones included."""
MAX_LINKS = 2_000_000
"""Maximum number of directed links: a mesh of 1,400 devices."""


def with_profiles(scenario: Scenario) -> Scenario:
    """Return the scenario with the contents of all profile files included."""
    devices = {}
    for name, part in scenario.devices.items():
        if isinstance(part.profile, str) and part.profile.endswith((".yaml", ".yml")):
            file = scenario.source.folder / part.profile
            try:
                profile = _read_profile(file, part.profile)
            except InputError as error:
                problem = Diagnostic(("devices", name, "profile"), str(error))
                raise scenario.source.error([problem]) from None
            part = part.model_copy(update={"profile": profile})
        devices[name] = part
    return scenario.model_copy(update={"devices": devices})


def device_with_profile(file: Path) -> DeviceSpec:
    """Return a device with the profile of a file, named after the file; raises `InputError`."""
    return _load_profile(_read_profile(file, file.name)).device(file.name)


def device_names(name: str, part: DevicePart) -> list[str]:
    """Return the device names of one entry of the `devices` section.

    >>> device_names("worker", DevicePart(count=3))
    ['worker1', 'worker2', 'worker3']
    """
    if part.count is None:
        return [name]
    return [f"{name}{number}" for number in range(1, part.count + 1)]


def expand_devices(scenario: Scenario) -> tuple[DeviceSpec, ...]:
    """Return every device with the values of the profile and the scenario, in the order of the scenario.

    Raises `InputError` for invalid names, unknown profiles and presets, and too many devices.
    """
    problems = list(_count_problems(scenario))
    # The other checks list all names, and the names of too many devices would not fit in memory.
    if not problems:
        problems = [*_device_problems(scenario), *_name_problems(scenario)]
    if problems:
        raise scenario.source.error(problems)
    devices: list[DeviceSpec] = []
    for entry, part in scenario.devices.items():
        profile = _profile_of(part)
        assert profile is not None, "`_device_problems` has refused unknown profiles"
        device = _override_profile(profile.device(entry, part.precision), part)
        for name in device_names(entry, part):
            devices.append(replace(device, name=name))
    return tuple(devices)


def preset_problems(preset: str | None, key: Key) -> list[Diagnostic]:
    """Return an error for an unknown link preset at a key of the scenario; none without a preset."""
    if preset is None or preset in PRESETS:
        return []
    return [Diagnostic(key, f"unknown preset '{preset}': {nearest(preset, PRESETS)}")]


def _read_profile(file: Path, name: str) -> ProfilePart:
    return parse(ProfilePart, {"name": name, **read_keys(file)})


def _load_profile(part: ProfilePart) -> Profile:
    return Profile(
        name=part.name,
        speed=part.speed,
        memory=part.memory,
        basis="measured",
        source=part.name,
        processors=part.processors,
        memory_rate=part.memory_rate,
        kinds={
            kind: Rates(rates.speed, rates.memory_rate, rates.weight_rate)
            for kind, rates in part.kinds.items()
        },
        watts=None if part.watts is None else part.watts.pair,
        precisions=part.precisions,
    )


def _profile_of(part: DevicePart) -> Profile | None:
    """Return the profile of a device; None for an unknown one."""
    if isinstance(part.profile, str):
        return PROFILES.get(part.profile)
    return _load_profile(part.profile)


_OVERRIDES = (
    "speed",
    "memory",
    "memory_rate",
    "processors",
    "cpus",
    "slowdown",
    "gpu",
    "uplink",
    "downlink",
)
"""Fields of `DevicePart` that override the field of the same name in `DeviceSpec`."""


def _override_profile(device: DeviceSpec, part: DevicePart) -> DeviceSpec:
    """Return a device of a profile with the values set in the scenario."""
    if part.access is not None:
        preset = PRESETS[part.access]
        device = replace(device, uplink=preset.up, downlink=preset.down)
    if part.watts is not None:
        device = replace(device, watts=part.watts.pair)
    if part.speed is not None:
        # The scenario's speed is that of the device's precision, so the profile's factor for it must not apply.
        device = replace(device, faster=1.0)
    if part.speed is not None or part.memory_rate is not None:
        # The profile's rates by kind of layer were measured with the profile's own speed.
        device = replace(device, kinds={})
    overrides = {}
    for name in _OVERRIDES:
        value = getattr(part, name)
        if value is not None:
            overrides[name] = value
    # These come last, because `uplink` and `downlink` override the preset of `access`.
    return replace(device, **overrides)


def _count_problems(scenario: Scenario) -> Iterator[Diagnostic]:
    total = sum(part.count or 1 for part in scenario.devices.values())
    if scenario.network.topology == "mesh" and total * (total - 1) > MAX_LINKS:
        text = f"a mesh of {total:,} devices has more than {MAX_LINKS:,} links: use fewer, or the topology star"
        yield Diagnostic(("devices",), text)
    elif total > MAX_DEVICES:
        text = f"has {total:,} devices, more than {MAX_DEVICES:,}: use fewer"
        yield Diagnostic(("devices",), text)


def _name_problems(scenario: Scenario) -> Iterator[Diagnostic]:
    earlier_names: set[str] = set()
    for name, part in scenario.devices.items():
        key: Key = ("devices", name)
        names = device_names(name, part)
        # The last name of a group is the longest, since it has the most digits.
        if len(names[-1]) > _MAX_NAME:
            yield Diagnostic(
                key,
                f"'{names[-1]}' is longer than {_MAX_NAME} characters: shorten the name",
            )
        for device in names:
            if device in earlier_names:
                text = (
                    f"a second device would be called '{device}': rename one of the two"
                )
                yield Diagnostic(key, text)
            earlier_names.add(device)


def _device_problems(scenario: Scenario) -> Iterator[Diagnostic]:
    for name, part in scenario.devices.items():
        key: Key = ("devices", name)
        yield from _profile_problems(part, key)
        yield from preset_problems(part.access, (*key, "access"))
        for rate_key in ("uplink", "downlink"):
            rate = getattr(part, rate_key)
            text = None if rate is None else rate_problem(rate)
            if text is not None:
                yield Diagnostic((*key, rate_key), text)
        if part.gpu and not scenario.workload.uses_gpu:
            text = "applies to user programs only: methods compute on processors, at the rates of the profile "
            text += "(which may be those of a GPU, by kind of layer); remove the key"
            yield Diagnostic((*key, "gpu"), text)
        if part.slowdown is not None and part.speed is None:
            text = "the host's speed is unknown to planners: also give the speed that plans assume"
            yield Diagnostic((*key, "slowdown"), text)


def _profile_problems(part: DevicePart, key: Key) -> Iterator[Diagnostic]:
    profile = _profile_of(part)
    if profile is None:
        suggestion = nearest(str(part.profile), PROFILES)
        text = f"unknown profile '{part.profile}': {suggestion}"
        yield Diagnostic((*key, "profile"), text)
        return
    # The profile's speed is that of float32, and int8 is as fast unless the profile has another speed for it.
    has_speed = part.speed is not None or part.precision in ("f32", "int8")
    if not has_speed and part.precision not in profile.precisions:
        text = f"the profile {profile.name} has no speed in {part.precision}: give a `speed` measured in this precision"
        yield Diagnostic((*key, "precision"), text)
