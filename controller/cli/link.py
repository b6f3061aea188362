"""`testbed link`: look at, change and measure the links of a lab that is up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from controller.cli.linkoptions import link_options, read
from controller.cli.options import CommandGroup, as_json, run_option
from controller.cli.printing import dump, print_table
from controller.lab import runstate
from controller.lab.lab import Lab
from controller.report.grouping import describe
from controller.running.byhand import carry_out_by_hand
from controller.running.faults import Containers
from testbed.common import formats
from testbed.common.errors import InputError, TestbedError
from testbed.faults.conditions import Conditions
from testbed.network import checks
from testbed.network.link import Link, Pair, links_from_json, links_to_json
from testbed.network.overlay import overlay
from testbed.network.parts import LinkPart
from testbed.network.presets import PRESETS
from testbed.scenario.loading import parse


@click.group(cls=CommandGroup)
def link() -> None:
    """Look at, change and measure the links of a lab that is up.

    Links are directed and delays one-way.

    \b
    Examples:
      testbed link show
      testbed link set source worker1 --rate 10mbit --delay 20ms --loss 1% --both
      testbed link probe source worker1
    """


@link.command()
@click.argument("source", required=False)
@click.argument("destination", required=False)
@run_option
@as_json
def show(source: str | None, destination: str | None, run_id: str | None, as_json: bool) -> None:
    """Show the links in force, all or those from SOURCE to DESTINATION; exit 1 where the kernel holds another.

    What was applied is read back from every device's interface as this command runs.
    """
    shown = Lab.open(runstate.choose(run_id)).shaper.show()
    links = links_from_json(shown["links"])
    chosen = {pair: links[pair] for pair in _choose(links, source, destination)}
    if as_json:
        dump({**shown, "links": links_to_json(chosen)})
    else:
        click.echo(f"backend {shown['backend']}")
        print_table(
            ["source", "destination", "figures"],
            [[*pair, describe(each.to_json())] for pair, each in chosen.items()],
        )
    wrong = [f"{name}: {text}" for name, device in shown["devices"].items() for text in device["differences"]]
    if wrong:
        raise TestbedError("the kernel holds something else than was asked for: " + "; ".join(wrong))


@link.command(name="set")
@click.argument("source")
@click.argument("destination")
@click.option("--unlimited", is_flag=True, help="Take the rate away: as fast as the host.")
@click.option("--up/--down", "up", default=None, help="Let packets through again, or drop them all silently.")
@click.option("--both", is_flag=True, help="Also from DESTINATION to SOURCE.")
@run_option
@link_options
def change(
    source: str,
    destination: str,
    unlimited: bool,
    up: bool | None,
    both: bool,
    figures: dict[str, str],
    run_id: str | None,
) -> None:
    """Change the link from SOURCE to DESTINATION while it is used; what is not given stays as it is.

    No other link notices. The figures hold for the rest of the run: faults that touch the link later, and devices that
    restart, start from them. A fault that is in force on the link goes on hiding what it changes.
    """
    direct: dict[str, Any] = ({"rate": None} if unlimited else {}) | ({} if up is None else {"up": up})
    part = _part(read(figures) if figures or not direct else {})
    lab = Lab.open(runstate.choose(run_id))
    pairs = [(source, destination), *([(destination, source)] if both else [])]
    for pair in pairs:
        _choose(lab.experiment.links, *pair)
    containers = Containers(lab)
    carry_out_by_hand(_Setting(pairs, part, direct), containers)
    shown = containers.shown
    for pair in pairs:
        click.echo(f"{pair[0]} -> {pair[1]}: {describe(shown.link(pair).to_json())}")


@dataclass(frozen=True)
class _Setting:
    """Figures that links have from now on, under the faults in force."""

    pairs: Sequence[Pair]
    part: LinkPart
    direct: Mapping[str, Any]
    """What a part of a scenario cannot say, by field of `Link`."""
    switches: bool = False

    def apply(self, now: Conditions) -> Conditions:
        """Return the conditions after it; raise InputError where a link would be one that cannot be."""
        return now.set_figures({pair: self._figures(pair, now) for pair in self.pairs})

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return nothing: the events of the links that change say it all."""
        return []

    def _figures(self, pair: Pair, now: Conditions) -> Link:
        wanted = replace(overlay(now.own_link(pair), self.part, now.from_first(pair)), **self.direct)
        if problems := checks.problems(wanted):
            raise InputError("; ".join(f"{pair[0]} -> {pair[1]}: {problem.text}" for problem in problems))
        return wanted


def _part(figures: dict[str, Any]) -> LinkPart:
    part = parse(LinkPart, figures)
    if part.preset is not None and part.preset not in PRESETS:
        raise InputError(f"there is no preset '{part.preset}': use one of {', '.join(PRESETS)}")
    return part


@link.command()
@click.argument("source", required=False)
@click.argument("destination", required=False)
@run_option
@as_json
def probe(source: str | None, destination: str | None, run_id: str | None, as_json: bool) -> None:
    """Measure the links as they are now, all or those from SOURCE to DESTINATION; exit 1 outside tolerance.

    Delay and loss are measured on every link, the rate on one of each kind. A run that uses the links meanwhile
    disturbs the figures.
    """
    shaper = Lab.open(runstate.choose(run_id)).shaper
    shown = shaper.show()
    running = shown["devices"].keys()
    pairs = [pair for pair in _choose(links_from_json(shown["links"]), source, destination) if running >= set(pair)]
    measured = shaper.probe(pairs)
    if as_json:
        dump([each.to_json() for each in measured])
    else:
        rows = [
            [
                each.source,
                each.destination,
                describe(each.requested.to_json()),
                formats.rate(each.rate) if each.rate is not None else formats.NONE,
                formats.seconds(each.delay),
                formats.share(each.loss),
                str(each.packets),
                each.problem or "",
            ]
            for each in measured
        ]
        header = ["source", "destination", "requested", "rate", "delay", "loss", "packets", "problem"]
        print_table(header, rows)
    problems = sum(each.problem is not None for each in measured)
    if problems:
        raise TestbedError(f"{problems} of {len(measured)} links are outside their tolerance")


def _choose(links: Iterable[Pair], source: str | None, destination: str | None) -> list[Pair]:
    """Return the links between these ends, any end where none is named; raise InputError when there is none."""
    chosen = [pair for pair in links if source in (None, pair[0]) and destination in (None, pair[1])]
    if not chosen:
        names = sorted({name for pair in links for name in pair})
        ends = f"from {source}" + (f" to {destination}" if destination else "")
        raise InputError(f"there is no link {ends}; the devices are {', '.join(names)}")
    return chosen
