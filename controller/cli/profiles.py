"""`testbed profiles`: devices and links of known speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from controller.cli.options import as_json
from controller.cli.printing import dump, make_console
from testbed.common import formats

if TYPE_CHECKING:
    from rich.console import Console

    from testbed.hardware import Profile
    from testbed.network.presets import LinkPreset


@click.command()
@as_json
def profiles(as_json: bool) -> None:
    """List device profiles, link presets and radios, each with the source of its figures.

    The speed is what the pacing charges computing at. Most are results of HPL, which is a device's best in large
    float64 matrix products: measure your own network and override `speed` where the absolute time matters.

    \b
    Example, in a scenario:
      devices:
        worker: {profile: raspberry-pi-4b, count: 3, memory: 2GiB}
      network:
        link: {preset: 802.11a, delay: 3ms}
        radio: {preset: 802.11a, area: [50, 50]}
    """
    from testbed.common.quantities import format_rate, format_size
    from testbed.hardware import PROFILES
    from testbed.network.presets import PRESETS
    from testbed.network.radio import TRANSCEIVERS

    if as_json:
        dump(
            {
                "devices": [asdict(profile) for profile in PROFILES.values()],
                "links": [asdict(preset) for preset in PRESETS.values()],
                "radios": [asdict(radio) for radio in TRANSCEIVERS.values()],
            }
        )
        return
    console = make_console()
    console.print("[bold]Devices[/bold]")
    devices = [
        (each.name, formats.speed(each.speed), format_size(each.memory), _basis(each), each.source)
        for each in PROFILES.values()
    ]
    _print_sourced(console, devices)
    console.print("\n[bold]Links[/bold]: up is towards the first device of the scenario")
    links = [
        (each.name, f"{format_rate(each.up)} up", f"{format_rate(each.down)} down", _delay(each), each.source)
        for each in PRESETS.values()
    ]
    _print_sourced(console, links)
    console.print("\n[bold]Radios[/bold], for `network.radio`: how far a cast is heard")
    radios = [
        (
            each.name,
            f"{each.transmit_power:g} dBm",
            f"{each.sensitivity:g} dBm",
            "sent with, still received",
            each.source,
        )
        for each in TRANSCEIVERS.values()
    ]
    _print_sourced(console, radios)


def _basis(profile: Profile) -> str:
    """Say where a speed comes from, and of how many processors it is the speed of each."""
    return (f"{profile.processors} processors, each: " if profile.processors > 1 else "") + profile.basis


def _delay(preset: LinkPreset) -> str:
    from testbed.common.quantities import format_duration

    delay = "delay is yours to give" if preset.delay is None else f"{format_duration(preset.delay)} one way"
    return delay if preset.frame is None else f"{delay}; frame {preset.frame} B"


def _print_sourced(console: Console, rows: Sequence[tuple[str, str, str, str, str]]) -> None:
    """Print rows of four figures, each with its source in the lines below."""
    from rich.markup import escape
    from rich.padding import Padding

    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for name, first, second, note, source in rows:
        console.print(
            f"  [cyan]{name:<{widths[0]}}[/cyan]  {first:>{widths[1]}}  {second:>{widths[2]}}  {note}", soft_wrap=True
        )
        console.print(Padding(f"[dim]{escape(source)}[/dim]", (0, 0, 0, 6)))
