"""`testbed fault` and `testbed link`: inject and revert faults, and change and measure links of a running lab.

Commands that take a section of the scenario get one option for each key of the section's schema.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Any, get_args

import click
from pydantic.fields import FieldInfo

from testbed.common import formats
from testbed.common.errors import InputError, TestbedError
from testbed.common.part import ConfigModel
from testbed.common.quantities import parse_duration
from testbed.faults.link_actions import Flap, Heal, LinkSetPart, NetworkPartition
from testbed.faults.parts import ACTIONS, ActionPart
from testbed.network.link import links_from_json, links_to_json
from testbed.network.parts import LinkPart
from testbed.scenario.loading import parse
from testbed.trace.outcome import LinkMeasurement
from testbed_controller.cli.options import CommandGroup, json_option, run_option
from testbed_controller.cli.printing import dump, print_table
from testbed_controller.hosts.lab import open_lab
from testbed_controller.lab import runstate
from testbed_controller.report.grouping import describe
from testbed_controller.running import control


def section_class(field: FieldInfo) -> type[ConfigModel] | None:
    """Return the section class of a scenario key; None for a key with a plain value."""
    # The annotation of an optional key is a union, whose arguments are the class and None.
    for annotation in (field.annotation, *get_args(field.annotation)):
        if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
            return annotation
    return None


def options_of(
    section: type[ConfigModel], excluded: Collection[str] = ()
) -> list[click.Parameter]:
    """Return a command option for each key of a scenario section, except the excluded keys.

    The help of an option is the description of its key, with an example.

    >>> from testbed.network.parts import LinkPart
    >>> [parameter.name for parameter in options_of(LinkPart)][:3]
    ['preset', 'rate', 'delay']
    """
    schemas = section.model_json_schema()["properties"]
    parameters: list[click.Parameter] = []
    for name, field in section.model_fields.items():
        if name in excluded:
            continue
        is_section = section_class(field) is not None
        parameters.append(
            click.Option(
                [f"--{name.replace('_', '-')}", name],
                required=field.is_required(),
                type=_parse_pairs if is_section else _click_type(schemas[name]),
                metavar="KEY=VALUE,..." if is_section else None,
                help=_help_text(field.description or "", schemas[name]),
            )
        )
    return parameters


def _click_type(schema: dict[str, Any]) -> click.Choice[str] | type[int | float | str]:
    """Return the click type of a key with the given JSON schema.

    Quantities such as ``50mbit`` are strings in the schema, and the scenario's validators parse them.
    """
    # The schema of an optional key has a branch for its values and one for null.
    for branch in (schema, *schema.get("anyOf", ())):
        if "enum" in branch:
            return click.Choice(branch["enum"])
        if branch.get("type") in ("integer", "number"):
            return int if branch["type"] == "integer" else float
    return str


def _help_text(description: str, schema: dict[str, Any]) -> str:
    text = (description[:1].upper() + description[1:]).replace("`", "")
    if "e.g." in text:
        return text
    for branch in (schema, *schema.get("anyOf", ())):
        if branch.get("examples"):
            return f"{text}, e.g. {branch['examples'][0]}"
    return text


def _parse_pairs(text: str) -> dict[str, str]:
    """Parse the value of an option for a nested section, for example ``p=1%,r=20%``."""
    pairs = {}
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if not equals:
            raise InputError(f"'{text}' must be a list such as p=1%,r=20%")
        # As in the names of options, a hyphen stands for an underscore.
        pairs[key.strip().replace("-", "_")] = value.strip()
    return pairs


@click.group(cls=CommandGroup)
def fault() -> None:
    """Inject faults into the devices and links of a running lab, and revert them.

    SOURCE and DESTINATION name the link between two devices, in both directions; SOURCE alone stands for all links of
    that device. GROUPS are comma-separated names of devices.

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


def _command_parameters(
    action: str, section: type[ConfigModel] | None
) -> list[click.Parameter]:
    """Return the arguments and options of an action's command, which replace the action's scenario keys."""
    if section is not None and issubclass(section, LinkSetPart):
        ends = [
            click.Argument(["source"]),
            click.Argument(["destination"], required=False),
        ]
        one_way = click.Option(
            ["--one-way"], is_flag=True, help="Only from SOURCE to DESTINATION."
        )
        # SOURCE, DESTINATION and --one-way replace the keys that name the links.
        parameters = [*ends, one_way, *options_of(section, LinkSetPart.model_fields)]
        if action == Flap.name:
            parameters.append(
                click.Option(["--for", "for_"], help="Total duration, e.g. 30s.")
            )
        return parameters
    if action == NetworkPartition.name:
        return [click.Argument(["groups"], nargs=-1, required=True)]
    if action == Heal.name:
        return []
    parameters = [click.Argument(["device"])]
    if section is not None:
        parameters += options_of(section, ["device"])
    return parameters


def _scenario_value(arguments: dict[str, Any]) -> object:
    """Convert the arguments of a command to the value of the action's key in a scenario."""
    if "groups" in arguments:
        return [group.split(",") for group in arguments["groups"]]
    # Absent options have the defaults of the scenario.
    values = {key: value for key, value in arguments.items() if value is not None}
    if "source" in values:
        source = values.pop("source")
        destination = values.pop("destination", None)
        one_way = values.pop("one_way")
        if destination is None:
            if one_way:
                raise InputError("--one-way needs a DESTINATION: name the receiver")
            return {**values, "device": source}
        if one_way:
            return {**values, "from": source, "to": destination}
        return {**values, "between": [source, destination]}
    # The command without parameters is `heal: all`.
    if not values:
        return "all"
    # An action that needs only its device is written `kill: worker1`.
    if values.keys() == {"device"}:
        return values["device"]
    return values


def _add_command(action: str) -> None:
    """Add the command of an action, with parameters from the action's scenario keys."""
    field = ActionPart.model_fields[action]
    section = section_class(field)

    @run_option
    def inject(run_id: str | None, for_: str | None = None, **arguments: Any) -> None:
        value = _scenario_value(arguments)
        # Flapping lasts until Ctrl-C or for a fixed time, so this process takes the links down and up itself.
        if action == Flap.name:
            _flap_links(run_id, value, for_)
        else:
            click.echo(control.strike(runstate.choose(run_id), {action: value}))

    text = f"{action.capitalize()}: {field.description}."
    command = click.command(action, help=text)(inject)
    command.params = [*_command_parameters(action, section), *command.params]
    fault.add_command(command)


for _action in ACTIONS:
    _add_command(_action)


def _devices_of(run: str, host: str) -> list[str]:
    """Return the devices of a run on a host. Raises InputError for a host without devices."""
    devices_of_hosts = runstate.hosts_of(run)
    if devices_of_hosts.get(host):
        return devices_of_hosts[host]
    known = [name for name, devices in devices_of_hosts.items() if devices]
    if not known:
        raise InputError(
            f"the run '{run}' has all devices on one engine: name devices instead, as in 'testbed fault kill worker1'"
        )
    raise InputError(
        f"the run '{run}' has no devices on the host '{host}'; hosts with devices: {', '.join(known)}"
    )


def _host_command(name: str, action: str, help_text: str) -> None:
    @fault.command(name, help=help_text)
    @click.argument("host")
    @run_option
    def command(host: str, run_id: str | None) -> None:
        run = runstate.choose(run_id)
        devices = _devices_of(run, host)

        def inject_into(device: str) -> str:
            return control.strike(run, {action: device})

        # In parallel, because all devices of a host fail at the same instant: in sequence, the remaining devices would
        # notice the loss of the first.
        with ThreadPoolExecutor(len(devices)) as pool:
            for reply in pool.map(inject_into, devices):
                click.echo(reply)


_host_command(
    "kill-host",
    "kill",
    "Kill all devices of a run on HOST at once, as a power failure would.",
)
_host_command("restart-host", "restart", "Restart all devices of a run on HOST.")


@fault.command("partition-hosts")
@click.argument("hosts", nargs=-1, required=True)
@run_option
def partition_hosts(hosts: tuple[str, ...], run_id: str | None) -> None:
    """Cut the links between HOSTS, and between HOSTS and all other hosts.

    Devices on one host still reach each other, and so do devices on hosts that are not named.
    """
    run = runstate.choose(run_id)
    groups = [_devices_of(run, host) for host in hosts]
    click.echo(control.strike(run, {"partition": groups}))


def _flap_links(run_id: str | None, value: Any, for_: str | None) -> None:
    """Take links down and up a number of times, for a duration, or until Ctrl-C; `control.flap` leaves the links up."""
    action = parse(ActionPart, {"flap": value}).action
    if for_ is not None and action.reason_against_for is not None:
        raise InputError(action.reason_against_for)
    send_request = control.connect(runstate.choose(run_id))
    duration = None if for_ is None else _parse_duration_option(for_)
    down_count, longest_delay = 0, 0.0
    with suppress(KeyboardInterrupt):
        for progress in control.flap(send_request, value, duration):
            down_count, longest_delay = progress
    click.echo(
        f"the links went down {down_count} times; each change took effect at most {longest_delay * 1e3:.0f} ms late"
    )


def _parse_duration_option(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise InputError(f"--for: {error}") from None


@fault.command()
@click.argument("handle")
@run_option
def undo(handle: str, run_id: str | None) -> None:
    """Revert one fault by handle, for example degrade-1a2b3c or pause:worker1."""
    send_request = control.connect(runstate.choose(run_id))
    click.echo(send_request({"undo": handle})["text"])


@click.group(cls=CommandGroup)
def link() -> None:
    """Show, change and measure the links of a running lab.

    Links are directed, and delays are one-way.

    \b
    Examples:
      testbed link show
      testbed link set source worker1 --rate 10mbit --delay 20ms --loss 1% --both
      testbed link measure source worker1
    """


link.renamed = {"probe": "testbed link measure"}


@link.command()
@click.argument("source", required=False)
@click.argument("destination", required=False)
@run_option
@json_option
def show(
    source: str | None, destination: str | None, run_id: str | None, as_json: bool
) -> None:
    """Show all current links, the links from SOURCE, or the link from SOURCE to DESTINATION.

    The settings are read back from the network interfaces of the devices. The exit status is 1 if they differ from the
    requested links.
    """
    state = open_lab(runstate.choose(run_id)).shaper.show()
    links = links_from_json(state["links"])
    pairs = control.choose_links(links, source, destination)
    shown_links = {pair: links[pair] for pair in pairs}
    if as_json:
        dump({**state, "links": links_to_json(shown_links)})
    else:
        click.echo(f"backend {state['backend']}")
        rows = []
        for pair, properties in shown_links.items():
            rows.append([*pair, describe(properties.to_json())])
        print_table(["source", "destination", "properties"], rows)
    # Differences on all devices are reported, even for a single link: a device has one configuration for all its links.
    differences = []
    for name, device in state["devices"].items():
        for text in device["differences"]:
            differences.append(f"{name}: {text}")
    if differences:
        texts = "; ".join(differences)
        raise TestbedError(
            f"the kernel's settings differ from the requested links: set these links again with 'testbed link set' "
            f"({texts})"
        )


@link.command(name="set")
@click.argument("source")
@click.argument("destination")
@click.option(
    "--unlimited", is_flag=True, help="Remove the rate limit: as fast as the host."
)
@click.option(
    "--up/--down",
    "up",
    default=None,
    help="Pass packets again, or drop all of them silently.",
)
@click.option("--both", is_flag=True, help="Also from DESTINATION to SOURCE.")
@run_option
def change(
    source: str,
    destination: str,
    unlimited: bool,
    up: bool | None,
    both: bool,
    run_id: str | None,
    **properties: Any,
) -> None:
    """Change the given properties of the link from SOURCE to DESTINATION during use.

    Other links are not disturbed. The new values hold for the rest of the run, even after later faults and restarts of
    devices. If an active fault overrides a property, the new value takes effect when the fault ends.
    """
    # Values that a scenario cannot express, beside the keys of its section.
    direct: dict[str, Any] = {}
    if unlimited:
        direct["rate"] = None
    if up is not None:
        direct["up"] = up
    pairs = [(source, destination)]
    if both:
        pairs.append((destination, source))
    section = {key: value for key, value in properties.items() if value is not None}
    if unlimited and "rate" in section:
        raise InputError(
            "--unlimited cannot be combined with --rate: remove one of them"
        )
    if not section and not direct:
        raise InputError(
            f"the link {source} -> {destination} is unchanged: give at least one option, such as --rate 10mbit"
        )
    request = {"pairs": pairs, "part": section, "direct": direct}
    send_request = control.connect(runstate.choose(run_id))
    reply = send_request({"set": request})
    for (start, end), changed in links_from_json(reply["links"]).items():
        click.echo(f"{start} -> {end}: {describe(changed.to_json())}")


# The options that the function receives as ``properties``.
change.params += options_of(LinkPart)


@link.command()
@click.argument("source", required=False)
@click.argument("destination", required=False)
@run_option
@json_option
def measure(
    source: str | None, destination: str | None, run_id: str | None, as_json: bool
) -> None:
    """Measure all current links, the links from SOURCE, or the link from SOURCE to DESTINATION.

    Delay and loss are measured on every link between running devices, and the rate on one of all links with the same
    properties. A workload that uses the links at the same time distorts the results. The exit status is 1 if a link is
    outside its tolerance, or if no link can be measured.
    """
    shaper = open_lab(runstate.choose(run_id)).shaper
    state = shaper.show()
    # The shaper reports running devices only.
    running = state["devices"].keys()
    links = links_from_json(state["links"])
    requested_pairs = control.choose_links(links, source, destination)
    # A link can be measured only while both of its ends run.
    pairs = [pair for pair in requested_pairs if running >= set(pair)]
    if not pairs:
        ends = sorted(set(chain.from_iterable(requested_pairs)))
        names = ", ".join(sorted(running)) or "none"
        raise TestbedError(
            f"no link can be measured: restart the devices that are down (running: {names}; ends of the links: "
            f"{', '.join(ends)})"
        )
    measurements = shaper.probe(pairs)
    if as_json:
        dump([each.to_json() for each in measurements])
    else:
        header = ["source", "destination", "requested", "rate"]
        header += ["delay", "loss", "packets", "problem"]
        print_table(header, [_measurement_row(each) for each in measurements])
    problems = sum(each.problem is not None for each in measurements)
    if problems:
        raise TestbedError(
            f"{problems} of {len(measurements)} links are outside their tolerance; the column 'problem' has the reasons"
        )


def _measurement_row(measurement: LinkMeasurement) -> list[str]:
    rate = formats.NONE
    if measurement.rate is not None:
        rate = formats.rate(measurement.rate)
    return [
        measurement.source,
        measurement.destination,
        describe(measurement.expected.to_json()),
        rate,
        formats.seconds(measurement.delay),
        formats.share(measurement.loss),
        str(measurement.packets),
        measurement.problem or "",
    ]
