"""Options shared by several commands, and the format of command groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from testbed.common.errors import InputError

if TYPE_CHECKING:
    from testbed.scenario.schema import Scenario

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
overrides_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the scenario, written as a dotted path: network.link.rate=10mbit. May be repeated.",
)


def _check_backend(_context: click.Context, _option: click.Parameter, name: str) -> str:
    from testbed_controller.shaping.backend import check_name

    try:
        return check_name(name)
    except InputError as error:
        raise click.BadParameter(error.text) from None


links_option = click.option(
    "--links",
    callback=_check_backend,
    default="auto",
    show_default=True,
    envvar="TESTBED_LINKS",
    show_envvar=True,
    metavar="BACKEND",
    help="Link backend: netem, userspace, or a backend of an installed package; auto uses netem if the kernel has it.",
)


def _split_names(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> list[str]:
    names = []
    for part in (text or "").split(","):
        name = part.strip()
        # Empty after a comma at the end, and without the option.
        if name:
            names.append(name)
    return names


def _parse_placement(
    _context: click.Context, _option: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str]:
    host_of = {}
    for text in texts:
        device, _, host = text.partition("=")
        if not device or not host:
            raise click.BadParameter(f"'{text}' must be DEVICE=HOST")
        host_of[device] = host
    return host_of


_hosts = click.option(
    "--hosts",
    callback=_split_names,
    metavar="HOST,...",
    envvar="TESTBED_HOSTS",
    show_envvar=True,
    help="Run on the engines of these Docker contexts, all of one swarm; see docs/hosts.md.",
)
_place = click.option(
    "--place",
    multiple=True,
    callback=_parse_placement,
    metavar="DEVICE=HOST",
    help="With --hosts, place DEVICE on HOST. May be repeated.",
)
_lab = click.option(
    "--lab",
    "lab_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    envvar="TESTBED_LAB",
    show_envvar=True,
    help="File with hosts, placement of devices, and faults of hosts; see docs/hosts.md.",
)


def on_hosts(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for the hosts of a run, combined into the argument ``where``, a `LabPart`."""

    @wraps(command)
    def with_hosts(
        hosts: list[str], place: dict[str, str], lab_file: Path | None, **others: Any
    ) -> None:
        from testbed_controller.hosts.placement import read_lab

        command(where=read_lab(lab_file, tuple(hosts), place), **others)

    return _hosts(_place(_lab(with_hosts)))


run_option = click.option(
    "--run",
    "run_id",
    metavar="RUN",
    help="Name of the run.  [default: the only one that is up]",
)
out_option = click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Results folder, new or empty.  [default: results/<run>, with a number appended if that exists]",
)
accept_links_option = click.option(
    "--accept-links",
    is_flag=True,
    help="Run despite links outside their tolerance (noted in the verdict).",
)
watch_option = click.option(
    "--watch",
    is_flag=True,
    help="Show the running experiment in the browser; see `testbed watch`.",
)
metrics_json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the metrics as JSON; progress goes to standard error.",
)


class CommandGroup(click.Group):
    """A group listing the full first sentence of each command, which click would truncate."""

    renamed: Mapping[str, str] = {}
    """Former names of commands, with the command lines that replace them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command named by the arguments; for a former name, exit with a message about the replacement."""
        name = args[0]
        # A package may add a command under a former name.
        if name in self.renamed and self.get_command(ctx, name) is None:
            ctx.fail(f"'{name}' has been replaced: use '{self.renamed[name]}'")
        return super().resolve_command(ctx, args)

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the commands with their summaries."""
        names = self.list_commands(ctx)
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.describe(ctx, name)) for name in names])

    def describe(self, ctx: click.Context, name: str) -> str:
        """Return the first sentence of a command's help."""
        command = self.get_command(ctx, name)
        return "" if command is None else first_sentence(command)


def first_sentence(command: click.Command) -> str:
    """Return the first sentence of a command's help, at most 300 characters long.

    >>> first_sentence(click.Command("ls", help="List files. Follow links."))
    'List files.'
    """
    return command.get_short_help_str(300)


def runs_code_from_results(scenario: Scenario) -> bool:
    """Return whether a scenario uses Python files stored with the results of a run.

    Results are passed on between people, who would not expect `validate` or `plan` to execute code in them, so these
    commands refuse such files.
    """
    sources = scenario.workload.sources().values()
    names_files = any(part.file is not None for part in sources)
    # A folder of results has a manifest.
    return names_files and (scenario.source.folder / "manifest.json").is_file()
