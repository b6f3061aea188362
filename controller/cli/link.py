"""`testbed link`: look at, change and measure the links of a lab that is up."""

from __future__ import annotations

from typing import Any

import click

from controller.cli.options import CommandGroup, as_json, run_option
from controller.cli.partoptions import options_of
from controller.cli.printing import dump, print_table
from controller.hosts.lab import open_lab
from controller.lab import runstate
from controller.report.grouping import describe
from controller.running import control
from testbed.common import formats
from testbed.common.errors import InputError, TestbedError
from testbed.network.link import links_from_json, links_to_json
from testbed.network.parts import LinkPart


@click.group(cls=CommandGroup)
def link() -> None:
    """Show, change and measure the links of a lab that is up.

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
    shown = open_lab(runstate.choose(run_id)).shaper.show()
    links = links_from_json(shown["links"])
    chosen = {pair: links[pair] for pair in control.choose(links, source, destination)}
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
def change(
    source: str,
    destination: str,
    unlimited: bool,
    up: bool | None,
    both: bool,
    run_id: str | None,
    **figures: Any,
) -> None:
    """Change the link from SOURCE to DESTINATION while it is used; what is not given stays as it is.

    No other link notices. The figures hold for the rest of the run: faults that touch the link later, and devices that
    restart, start from them. A fault that is in force on the link goes on hiding what it changes.
    """
    direct: dict[str, Any] = ({"rate": None} if unlimited else {}) | ({} if up is None else {"up": up})
    pairs = [(source, destination), *([(destination, source)] if both else [])]
    part = {key: value for key, value in figures.items() if value is not None}
    if not part and not direct:
        raise InputError("changes nothing: give at least one of its options")
    asked = {"pairs": pairs, "part": part, "direct": direct}
    done = control.reach(runstate.choose(run_id))({"set": asked})
    for pair, shown in links_from_json(done["links"]).items():
        click.echo(f"{pair[0]} -> {pair[1]}: {describe(shown.to_json())}")


change.params += options_of(LinkPart)


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
    shaper = open_lab(runstate.choose(run_id)).shaper
    shown = shaper.show()
    running = shown["devices"].keys()
    pairs = [
        pair for pair in control.choose(links_from_json(shown["links"]), source, destination) if running >= set(pair)
    ]
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
