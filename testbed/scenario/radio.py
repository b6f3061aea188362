"""Construction of the radio model from the scenario's network and device positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from testbed.common.errors import Diagnostic, nearest
from testbed.network.parts import RadioPart, ReceptionReferencePart
from testbed.network.radio import (
    TRANSCEIVERS,
    Position,
    Propagation,
    Radio,
    draw_positions,
    with_mean_reception,
)
from testbed.scenario.schema import Scenario


def build_radio(scenario: Scenario, names: Sequence[str], seed: int) -> Radio | None:
    """Return the radio of the named devices; None without one. Raises `InputError` naming file and line."""
    problems = list(_radio_problems(scenario))
    if problems:
        raise scenario.source.error(problems)
    part = scenario.network.radio
    if part is None:
        return None
    fixed_positions = {}
    for name, device in scenario.devices.items():
        if device.position is not None:
            fixed_positions[name] = device.position
    positions = draw_positions(names, fixed_positions, part.area, seed)
    power, sensitivity = part.transmit_power, part.sensitivity
    preset = TRANSCEIVERS[part.preset]
    propagation = Propagation(
        preset.transmit_power if power is None else power,
        preset.sensitivity if sensitivity is None else sensitivity,
        part.path_loss_exponent,
        part.reference_loss,
        part.shadowing,
    )
    if part.mean_reception is not None:
        power = _power_for_mean_reception(
            part, propagation, names, fixed_positions, seed
        )
        propagation = replace(propagation, transmit_power=power)
    return Radio(propagation, positions, part.packets, seed)


def _power_for_mean_reception(
    part: RadioPart,
    propagation: Propagation,
    names: Sequence[str],
    fixed_positions: Mapping[str, Position],
    seed: int,
) -> float:
    """Return the transmit power in dBm for the mean reception ratio `mean_reception`.

    The mean is over the devices, area and path loss of `mean_reception_at`, by default those of the radio.
    """
    assert part.mean_reception is not None
    reference = part.mean_reception_at or ReceptionReferencePart()
    positions = draw_positions(
        reference.devices or names, fixed_positions, reference.area or part.area, seed
    )
    exponent = reference.path_loss_exponent or part.path_loss_exponent
    calibrated = with_mean_reception(
        replace(propagation, path_loss_exponent=exponent),
        positions.values(),
        part.mean_reception,
    )
    return calibrated.transmit_power


def _position_problems(
    scenario: Scenario, part: RadioPart | None
) -> Iterator[Diagnostic]:
    for name, device in scenario.devices.items():
        if device.position is None:
            continue
        key = ("devices", name, "position")
        x, y = device.position
        if part is None:
            yield Diagnostic(
                key, "requires `network.radio`: add a radio, or remove this key"
            )
        # A group has one `position`, which would be the same for all of its devices, at distance zero.
        elif device.count is not None:
            yield Diagnostic(
                key,
                f"would put {device.count} devices in one place: name them one by one",
            )
        elif not (0 <= x <= part.area[0] and 0 <= y <= part.area[1]):
            width, height = part.area
            text = f"[{x:g}, {y:g}] is outside of the area: use [0, 0] to [{width:g}, {height:g}], or widen "
            yield Diagnostic(key, text + "`network.radio.area`")


def _radio_problems(scenario: Scenario) -> Iterator[Diagnostic]:
    part = scenario.network.radio
    yield from _position_problems(scenario, part)
    if part is None:
        return
    if part.preset not in TRANSCEIVERS:
        text = f"unknown radio '{part.preset}': {nearest(part.preset, TRANSCEIVERS)}"
        yield Diagnostic(("network", "radio", "preset"), text)
    if part.mean_reception is not None:
        yield from _mean_reception_problems(scenario, part)
    elif part.mean_reception_at is not None:
        yield Diagnostic(
            ("network", "radio", "mean_reception_at"),
            "requires `mean_reception`: add the ratio, or remove this key",
        )
    if scenario.network.link.message_loss is not None:
        text = "is computed by `network.radio` for each pair: remove one of the two"
        yield Diagnostic(("network", "link", "message_loss"), text)


def _mean_reception_problems(
    scenario: Scenario, part: RadioPart
) -> Iterator[Diagnostic]:
    key = ("network", "radio", "mean_reception")
    if part.transmit_power is not None:
        yield Diagnostic(
            key, "determines the transmit power: remove `transmit_power` or this key"
        )
    reference = part.mean_reception_at
    devices = sum(device.count or 1 for device in scenario.devices.values())
    if reference is not None and reference.devices:
        devices = len(set(reference.devices))
    if part.shadowing == 0 or devices < 2:
        yield Diagnostic(
            key,
            "requires at least two devices and shadowing: otherwise no transmit power gives an arbitrary mean",
        )
