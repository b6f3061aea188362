"""`testbed fault`: break and mend a lab that is up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import click

from controller.cli.options import CommandGroup, run_option
from controller.cli.partoptions import options_of, part_of
from controller.lab import runstate
from controller.running import control
from testbed.common.errors import InputError
from testbed.common.part import Part
from testbed.common.quantities import parse_duration
from testbed.faults.link_actions import Flap, Heal, LinkSetPart, NetworkPartition
from testbed.faults.parts import ACTIONS, ActionPart
from testbed.scenario.loading import parse


@click.group(cls=CommandGroup)
def fault() -> None:
    """Inject faults into the devices and links of a lab that is up, and undo them.

    SOURCE and DESTINATION name the link between two devices, in both directions; SOURCE alone stands for all of its
    links. GROUPS are comma-separated names.

    \b
    Examples:
      testbed fault kill worker1
      testbed fault restart worker1
      testbed fault partition source,worker1 worker2,worker3
      testbed fault degrade source worker1 --delay 200ms --loss 5%
      testbed fault obstruct sensor2 --path-loss-exponent 6
      testbed fault flap source worker1 --down 200ms --up 2s --times 5
      testbed fault throttle worker1 --slowdown 3
      testbed fault heal
    """


def _parameters(action: str, part: type[Part] | None) -> list[click.Parameter]:
    """Return what a command takes to say what a scenario says of an action."""
    if part is not None and issubclass(part, LinkSetPart):
        ends = [click.Argument(["source"]), click.Argument(["destination"], required=False)]
        one_way = click.Option(["--one-way"], is_flag=True, help="Only from SOURCE to DESTINATION.")
        return [*ends, one_way, *options_of(part, LinkSetPart.model_fields)]
    if action == NetworkPartition.name:
        return [click.Argument(["groups"], nargs=-1, required=True)]
    device = [] if action == Heal.name else [click.Argument(["device"])]
    return [*device, *(options_of(part, ["device"]) if part else [])]


def _value(given: dict[str, Any]) -> object:
    """Return what a scenario would say of an action, from the parameters of its command."""
    if "groups" in given:
        return [group.split(",") for group in given["groups"]]
    found = {key: value for key, value in given.items() if value is not None}
    if "source" in found:
        source, destination, one_way = found.pop("source"), found.pop("destination", None), found.pop("one_way")
        if destination is None:
            return {**found, "device": source}
        return {**found, **({"from": source, "to": destination} if one_way else {"between": [source, destination]})}
    return found if len(found) > 1 else found.get("device", "all")


def _add(action: str) -> None:
    """Add the command of an action, whose parameters are those of its part of a scenario."""
    field = ActionPart.model_fields[action]
    part = part_of(field)

    @run_option
    def strike(run_id: str | None, for_: str | None = None, **given: Any) -> None:
        value = _value(given)
        if action == Flap.name:
            _flap(run_id, value, for_)
        else:
            click.echo(control.strike(runstate.choose(run_id), {action: value}))

    text = f"{action.capitalize()}: {field.description}."
    made = click.command(action, help=text)(strike)
    made.params = [*_parameters(action, part), *made.params]
    fault.add_command(made)


for _action in ACTIONS:
    _add(_action)
fault.commands[Flap.name].params.insert(-1, click.Option(["--for", "for_"], help="How long in all, e.g. 30s"))


def _devices_of(run: str, host: str) -> list[str]:
    """Return the devices on a host of a run; raise InputError where it has none there."""
    hosts = runstate.hosts_of(run)
    if not hosts.get(host):
        known = ", ".join(name for name, devices in hosts.items() if devices) or "it is on one engine"
        raise InputError(f"the run '{run}' has no devices on a host '{host}' (hosts: {known})")
    return hosts[host]


def _host_command(name: str, action: str, text: str) -> None:
    @fault.command(name, help=text)
    @click.argument("host")
    @run_option
    def command(host: str, run_id: str | None) -> None:
        run = runstate.choose(run_id)
        devices = _devices_of(run, host)
        with ThreadPoolExecutor(len(devices)) as pool:
            for said in pool.map(lambda device: control.strike(run, {action: device}), devices):
                click.echo(said)


_host_command("kill-host", "kill", "End all devices of a run on HOST at once, as a power cut there would.")
_host_command("restart-host", "restart", "Boot all devices of a run on HOST again.")


@fault.command("partition-hosts")
@click.argument("hosts", nargs=-1, required=True)
@run_option
def partition_hosts(hosts: tuple[str, ...], run_id: str | None) -> None:
    """Cut HOSTS off from each other and from all others: of a run over several, the links between their devices."""
    run = runstate.choose(run_id)
    click.echo(control.strike(run, {"partition": [_devices_of(run, host) for host in hosts]}))


def _flap(run_id: str | None, given: Any, for_: str | None) -> None:
    """Take links down and up until it is over, or Ctrl-C; either way the links are up at the end."""
    action = parse(ActionPart, {"flap": given}).action
    if for_ is not None and action.takes_no_for is not None:
        raise InputError(action.takes_no_for)
    ask = control.reach(runstate.choose(run_id))
    turns, late = 0, 0.0
    with suppress(KeyboardInterrupt):
        for turns, late in control.flap(ask, given, None if for_ is None else _duration(for_)):  # noqa: B007 - the last is printed
            pass
    click.echo(f"the links went down {turns} times; the latest change took effect {late * 1e3:.0f} ms late")


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise InputError(f"for: {error}") from None


@fault.command()
@click.argument("handle")
@run_option
def undo(handle: str, run_id: str | None) -> None:
    """Take back one partition, degradation, obstruction or throttle by its handle."""
    click.echo(control.reach(runstate.choose(run_id))({"undo": handle})["text"])
