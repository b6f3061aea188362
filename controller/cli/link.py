"""`testbed link`: look at, change and measure the links of a lab that is up."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import click

from controller import runstate
from controller.cli.table import table
from controller.lab import Lab
from testbed.errors import InputError, TestbedError
from testbed.network.link import Link, Pair
from testbed.scenario import quantities

_run_option = click.option("--run", "run_id", metavar="RUN", help="Which run.  [default: the only one that is up]")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print as JSON.")


class _Quantity(click.ParamType[float]):
    """A quantity with its unit, as in a scenario."""

    def __init__(self, kind: str) -> None:
        self.name = kind
        self._parse = getattr(quantities, f"parse_{kind}")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(self._parse(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.group()
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
@_run_option
@_json_option
def show(source: str | None, destination: str | None, run_id: str | None, as_json: bool) -> None:
    """Show the links in force, all or those from SOURCE to DESTINATION; exit 1 where the kernel holds another.

    What was applied is read back from every device's interface as this command runs.
    """
    shown = Lab.open(runstate.choose(run_id)).shaper.show()
    links = _links(shown)
    chosen = {pair: links[pair] for pair in _choose(links, source, destination)}
    if as_json:
        rows = [{"source": pair[0], "destination": pair[1], **asdict(each)} for pair, each in chosen.items()]
        click.echo(json.dumps({**shown, "links": rows}, indent=2))
    else:
        click.echo(f"backend {shown['backend']}")
        table(
            ["source", "destination", "rate", "delay", "loss", "state"],
            [[*pair, *_figures(each), "up" if each.up else "down"] for pair, each in chosen.items()],
        )
    wrong = [f"{name}: {text}" for name, device in shown["devices"].items() for text in device["differences"]]
    if wrong:
        raise TestbedError("the kernel holds something else than was asked for: " + "; ".join(wrong))


@link.command(name="set")
@click.argument("source")
@click.argument("destination")
@click.option("--rate", type=_Quantity("rate"), help="e.g. 10mbit; 0 for as fast as the host")
@click.option("--delay", type=_Quantity("duration"), help="One-way, e.g. 20ms")
@click.option("--loss", type=_Quantity("fraction"), help="e.g. 1%")
@click.option("--up/--down", "up", default=None, help="Let packets through again, or drop them all silently.")
@click.option("--both", is_flag=True, help="Also from DESTINATION to SOURCE.")
@_run_option
def change(
    source: str,
    destination: str,
    rate: float | None,
    delay: float | None,
    loss: float | None,
    up: bool | None,
    both: bool,
    run_id: str | None,
) -> None:
    """Change the link from SOURCE to DESTINATION while it is used; what is not given stays as it is.

    No other link notices. Faults of the run that touch the same link later start from the scenario's figures.
    """
    given: dict[str, Any] = {"delay": delay, "loss": loss, "up": up}
    figures = {key: value for key, value in given.items() if value is not None}
    if rate is not None:
        figures["rate"] = rate or None
    if not figures:
        raise InputError("changes nothing: give at least one of --rate, --delay, --loss, --up and --down")
    shaper = Lab.open(runstate.choose(run_id)).shaper
    links = _links(shaper.show())
    pairs = [(source, destination), *([(destination, source)] if both else [])]
    for pair in pairs:
        _choose(links, *pair)
    changed = {pair: replace(links[pair], **figures) for pair in pairs}
    shaper.set(changed)
    for pair, each in changed.items():
        rate_text, delay_text, loss_text = _figures(each)
        state = "" if each.up else ", down"
        click.echo(f"{pair[0]} -> {pair[1]}: rate {rate_text}, delay {delay_text}, loss {loss_text}{state}")


@link.command()
@click.argument("source", required=False)
@click.argument("destination", required=False)
@_run_option
@_json_option
def probe(source: str | None, destination: str | None, run_id: str | None, as_json: bool) -> None:
    """Measure the links as they are now, all or those from SOURCE to DESTINATION; exit 1 outside tolerance.

    Delay and loss are measured on every link, the rate on one of each kind. A run that uses the links meanwhile
    disturbs the figures.
    """
    shaper = Lab.open(runstate.choose(run_id)).shaper
    shown = shaper.show()
    running = shown["devices"].keys()
    pairs = [pair for pair in _choose(_links(shown), source, destination) if running >= set(pair)]
    measured = shaper.probe(pairs)
    if as_json:
        click.echo(json.dumps([asdict(each) for each in measured], indent=2))
    else:
        rows = []
        for each in measured:
            rate, delay, loss = _figures(each.requested)
            rows.append(
                [
                    each.source,
                    each.destination,
                    rate,
                    "-" if each.rate is None else f"{each.rate / 1e6:.4g}mbit",
                    delay,
                    "-" if each.delay is None else f"{each.delay * 1e3:.3f}ms",
                    loss if each.requested.up else "down",
                    "-" if each.loss is None else f"{each.loss * 100:.3g}%",
                    str(each.packets),
                    each.problem or "",
                ]
            )
        header = ["source", "destination", "rate", "found", "delay", "found", "loss", "found", "packets", "problem"]
        table(header, rows)
    problems = sum(each.problem is not None for each in measured)
    if problems:
        raise TestbedError(f"{problems} of {len(measured)} links are outside their tolerance")


def _links(shown: dict[str, Any]) -> dict[Pair, Link]:
    links = {}
    for entry in shown["links"]:
        fields = dict(entry)
        pair = (fields.pop("source"), fields.pop("destination"))
        links[pair] = Link(**fields)
    return links


def _choose(links: Iterable[Pair], source: str | None, destination: str | None) -> list[Pair]:
    """Return the links between these ends, any end where none is named; raise InputError when there is none."""
    chosen = [pair for pair in links if source in (None, pair[0]) and destination in (None, pair[1])]
    if not chosen:
        names = sorted({name for pair in links for name in pair})
        ends = f"from {source}" + (f" to {destination}" if destination else "")
        raise InputError(f"there is no link {ends}; the devices are {', '.join(names)}")
    return chosen


def _figures(each: Link) -> tuple[str, str, str]:
    rate = "unlimited" if each.rate is None else quantities.format_rate(each.rate)
    return rate, quantities.format_duration(each.delay), quantities.format_fraction(each.loss)
