"""`testbed fault`: break and mend a lab that is up."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import wraps
from typing import Any

import click

from controller.cli.linkoptions import link_options, read
from controller.cli.options import CommandGroup, run_option
from controller.lab import runstate
from controller.running import control
from testbed.common.errors import InputError
from testbed.common.quantities import parse_duration
from testbed.faults.parts import ActionPart
from testbed.scenario.loading import parse


def _apply(run_id: str | None, given: dict[str, object]) -> None:
    click.echo(control.strike(runstate.choose(run_id), given))


@click.group(cls=CommandGroup)
def fault() -> None:
    """Break and mend the devices and links of a lab that is up.

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


def _device_command(action: str, text: str) -> None:
    @fault.command(action, help=text)
    @click.argument("device")
    @run_option
    def command(device: str, run_id: str | None) -> None:
        _apply(run_id, {action: device})


_device_command("kill", "End a device at once, as a power cut would.")
_device_command("restart", "Boot a device again; its links are shaped before it counts as up.")
_device_command("retire", "Tell a device to leave: it hands over what it holds, and is off.")
_device_command("join", "Boot a device again that was killed or has retired.")
_device_command("pause", "Freeze a device; its connections stay open.")
_device_command("resume", "Let a paused device go on.")
_device_command("unthrottle", "Give a throttled device its own speed back.")


@fault.command()
@click.argument("groups", nargs=-1, required=True)
@run_option
def partition(groups: tuple[str, ...], run_id: str | None) -> None:
    """Cut groups of devices off from each other: GROUPS are comma-separated names.

    Devices that are not named form one more group. Packets vanish silently, in both directions.
    """
    _apply(run_id, {"partition": [group.split(",") for group in groups]})


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
    _apply(run, {"partition": [_devices_of(run, host) for host in hosts]})


def _on_links(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the ends of the links that it strikes; it gets them as ``links``, in a scenario's words."""

    @click.argument("source")
    @click.argument("destination", required=False)
    @click.option("--one-way", is_flag=True, help="Only from SOURCE to DESTINATION.")
    @wraps(command)
    def struck(source: str, destination: str | None, one_way: bool, **given: Any) -> None:
        links: dict[str, object] = (
            {"from": source, "to": destination} if one_way else {"between": [source, destination]}
        )
        command(links={"device": source} if destination is None else links, **given)

    return struck


@fault.command()
@_on_links
@run_option
@link_options
def degrade(links: dict[str, object], figures: dict[str, str], run_id: str | None) -> None:
    """Make links worse: the one between SOURCE and DESTINATION, or all of SOURCE."""
    _apply(run_id, {"degrade": {**links, **read(figures)}})


@fault.command()
@_on_links
@click.option("--path-loss-exponent", type=float, required=True, help="Above the radio's own, e.g. 6")
@run_option
def obstruct(links: dict[str, object], path_loss_exponent: float, run_id: str | None) -> None:
    """Put something between SOURCE and DESTINATION, or around SOURCE: more of what is cast there is lost."""
    _apply(run_id, {"obstruct": {**links, "path_loss_exponent": path_loss_exponent}})


@fault.command()
@_on_links
@click.option("--down", required=True, help="How long the links are down each time, e.g. 200ms")
@click.option("--up", required=True, help="How long they are up in between, e.g. 2s")
@click.option("--times", type=int, help="How often.  [default: until --for is over, or Ctrl-C]")
@click.option("--for", "for_", help="How long in all, e.g. 30s")
@run_option
def flap(links: dict[str, object], down: str, up: str, times: int | None, for_: str | None, run_id: str | None) -> None:
    """Take links down and up again, over and over: the one between SOURCE and DESTINATION, or all of SOURCE.

    Goes on until it is over, or Ctrl-C; either way the links are up at the end.
    """
    given = {**links, "down": down, "up": up, "times": times}
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
@click.argument("device")
@click.option("--speed", help="e.g. 200mflops")
@click.option("--slowdown", help="Factor by which work takes longer, e.g. 3")
@run_option
def throttle(device: str, speed: str | None, slowdown: str | None, run_id: str | None) -> None:
    """Let DEVICE compute more slowly, also what it is computing right now."""
    given = {key: value for key, value in (("speed", speed), ("slowdown", slowdown)) if value is not None}
    _apply(run_id, {"throttle": {"device": device, **given}})


@fault.command()
@run_option
def heal(run_id: str | None) -> None:
    """Take back every partition, degradation and obstruction."""
    _apply(run_id, {"heal": "all"})


@fault.command()
@click.argument("handle")
@run_option
def undo(handle: str, run_id: str | None) -> None:
    """Take back one partition, degradation, obstruction or throttle by its handle."""
    click.echo(control.reach(runstate.choose(run_id))({"undo": handle})["text"])
