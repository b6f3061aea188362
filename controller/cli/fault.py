"""`testbed fault`: break and mend a lab that is up."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Any

import click
from pydantic import ValidationError

from controller.cli.linkoptions import link_options, read
from controller.lab import runstate
from controller.lab.lab import Lab
from controller.running.byhand import carry_out_by_hand
from controller.running.byhand import flap as flapping
from controller.running.faults import Containers
from testbed.errors import InputError
from testbed.faults.actions.flap import Flap
from testbed.faults.conditions import Changed, FaultAction
from testbed.faults.parts import ActionPart
from testbed.faults.script import FaultOperation
from testbed.faults.setting import Setting
from testbed.quantities import parse_duration
from testbed.scenario.loading import explain

_run_option = click.option("--run", "run_id", metavar="RUN", help="Which run.  [default: the only one that is up]")


def _checked(run_id: str | None, given: dict[str, object]) -> tuple[Containers, FaultAction[Any], str]:
    """Check an action as a scenario's would be; return the devices of the run, the action and a handle for it."""
    try:
        action = ActionPart.model_validate(given).action
    except ValidationError as error:
        raise InputError("; ".join(f"{problem}" for problem in explain(error, ActionPart))) from None
    lab = Lab.open(runstate.choose(run_id))
    for _, name in action.named():
        if name not in lab.devices:
            raise InputError(f"there is no device '{name}' in {lab.run_id}: {', '.join(lab.devices)}")
    run = lab.experiment
    for _, text in action.problems(Setting(run.devices, run.links, radio=run.radio)):
        raise InputError(text)
    return Containers(lab), action, f"{action.name}-{secrets.token_hex(3)}"


def _apply(run_id: str | None, given: dict[str, object]) -> None:
    """Check an action, apply it, and say what it changed."""
    containers, action, handle = _checked(run_id, given)
    changed = carry_out_by_hand(FaultOperation(action, handle), containers)
    if action.switches:
        nothing = "" if changed.devices else f" is {containers.states()[action.target]}, nothing to do"
        click.echo(f"{action.name}: {action.target}{nothing}")
    elif action.undoes:
        click.echo(_summary(changed))
    else:
        click.echo(f"{handle}: {_summary(changed)}; undo with: testbed fault undo {handle}")


def _summary(changed: Changed) -> str:
    links = [f"{len(changed.links)} directed links changed"] if changed.links or not changed.speeds else []
    speeds = [f"{name} computes at {factor:.4g} times its own speed" for name, factor in changed.speeds.items()]
    return ", ".join(links + speeds)


@click.group()
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
    @_run_option
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
@_run_option
def partition(groups: tuple[str, ...], run_id: str | None) -> None:
    """Cut groups of devices off from each other: GROUPS are comma-separated names.

    Devices that are not named form one more group. Packets vanish silently, in both directions.
    """
    _apply(run_id, {"partition": [group.split(",") for group in groups]})


@fault.command()
@click.argument("source")
@click.argument("destination", required=False)
@click.option("--one-way", is_flag=True, help="Only from SOURCE to DESTINATION.")
@_run_option
@link_options
def degrade(
    source: str,
    destination: str | None,
    one_way: bool,
    figures: dict[str, str],
    run_id: str | None,
) -> None:
    """Make links worse: the one between SOURCE and DESTINATION, or all of SOURCE."""
    _apply(run_id, {"degrade": {**_links(source, destination, one_way), **read(figures)}})


@fault.command()
@click.argument("source")
@click.argument("destination", required=False)
@click.option("--one-way", is_flag=True, help="Only from SOURCE to DESTINATION.")
@click.option("--path-loss-exponent", type=float, required=True, help="Above the radio's own, e.g. 6")
@_run_option
def obstruct(
    source: str, destination: str | None, one_way: bool, path_loss_exponent: float, run_id: str | None
) -> None:
    """Put something between SOURCE and DESTINATION, or around SOURCE: more of what is cast there is lost."""
    _apply(run_id, {"obstruct": {**_links(source, destination, one_way), "path_loss_exponent": path_loss_exponent}})


@fault.command()
@click.argument("source")
@click.argument("destination", required=False)
@click.option("--one-way", is_flag=True, help="Only from SOURCE to DESTINATION.")
@click.option("--down", required=True, help="How long the links are down each time, e.g. 200ms")
@click.option("--up", required=True, help="How long they are up in between, e.g. 2s")
@click.option("--times", type=int, help="How often.  [default: until --for is over, or Ctrl-C]")
@click.option("--for", "for_", help="How long in all, e.g. 30s")
@_run_option
def flap(
    source: str,
    destination: str | None,
    one_way: bool,
    down: str,
    up: str,
    times: int | None,
    for_: str | None,
    run_id: str | None,
) -> None:
    """Take links down and up again, over and over: the one between SOURCE and DESTINATION, or all of SOURCE.

    Goes on until it is over, or Ctrl-C; either way the links are up at the end.
    """
    links = {**_links(source, destination, one_way), "down": down, "up": up, "times": times}
    containers, action, handle = _checked(run_id, {"flap": links})
    assert isinstance(action, Flap)
    if for_ is not None and action.takes_no_for is not None:
        raise InputError(action.takes_no_for)
    seconds = None if for_ is None else _duration(for_)
    turns, late = 0, 0.0
    with suppress(KeyboardInterrupt):
        for turns, late in flapping(containers, action, handle, seconds):  # noqa: B007 - the last is printed
            pass
    click.echo(f"{handle}: the links went down {turns} times; the latest change took effect {late * 1e3:.0f} ms late")


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise InputError(f"for: {error}") from None


def _links(source: str, destination: str | None, one_way: bool) -> dict[str, object]:
    """Return the links that a fault strikes, in a scenario's words."""
    if destination is None:
        return {"device": source}
    return {"from": source, "to": destination} if one_way else {"between": [source, destination]}


@fault.command()
@click.argument("device")
@click.option("--speed", help="e.g. 200mflops")
@click.option("--slowdown", help="Factor by which work takes longer, e.g. 3")
@_run_option
def throttle(device: str, speed: str | None, slowdown: str | None, run_id: str | None) -> None:
    """Let DEVICE compute more slowly, also what it is computing right now."""
    given = {key: value for key, value in (("speed", speed), ("slowdown", slowdown)) if value is not None}
    _apply(run_id, {"throttle": {"device": device, **given}})


@fault.command()
@_run_option
def heal(run_id: str | None) -> None:
    """Take back every partition, degradation and obstruction."""
    _apply(run_id, {"heal": "all"})


@fault.command()
@click.argument("handle")
@_run_option
def undo(handle: str, run_id: str | None) -> None:
    """Take back one partition, degradation, obstruction or throttle by its handle."""
    containers = Containers(Lab.open(runstate.choose(run_id)))
    in_force = containers.shown.in_force
    if handle not in in_force:
        raise InputError(f"'{handle}' is not in force; what is: {', '.join(in_force) or 'nothing'}")
    click.echo(_summary(carry_out_by_hand(FaultOperation(in_force[handle], handle, "undo"), containers)))
