"""The `testbed` command. Subcommands are imported on use, to keep the start of each one fast."""

from __future__ import annotations

import atexit
import errno
import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from testbed.common import plugins
from testbed.common.collector import collect_garbage_rarely, skip_garbage_at_exit
from testbed.common.errors import HostError, InputError, TestbedError
from testbed.common.formats import escape_control
from testbed.common.logs import LEVEL, LEVELS, PACKAGES, LineFormatter
from testbed.common.version import VERSION
from testbed_controller.cli.options import CommandGroup
from testbed_controller.lab.paths import orphaned_runs

COMMANDS = {
    "init": (
        "testbed_controller.cli.validate:init",
        "Create FOLDER with a scenario, a network, a method and a test to start a study from.",
    ),
    "validate": (
        "testbed_controller.cli.validate:validate",
        "Check scenario files: keys, units, devices, links, the plan, faults and expectations.",
    ),
    "plan": (
        "testbed_controller.cli.plan:plan",
        "Show the placement of the model and its predicted cost without running anything.",
    ),
    "run": (
        "testbed_controller.cli.run:run",
        "Run SCENARIO (a file, or a name in scenarios/) and print the results.",
    ),
    "up": (
        "testbed_controller.cli.lab:up",
        "Create the devices and links of SCENARIO and keep them running without a workload.",
    ),
    "down": (
        "testbed_controller.cli.lab:down",
        "Remove a run: its containers, networks and state, including remains of an incomplete removal.",
    ),
    "watch": (
        "testbed_controller.cli.lab:watch",
        "Show RUN on a page in the browser: devices, links, learning curves, activity, and faults.",
    ),
    "ps": (
        "testbed_controller.cli.lab:ps",
        "List the containers of every run, with the activity of each device and the progress of the run.",
    ),
    "logs": (
        "testbed_controller.cli.lab:logs",
        "Print the log of DEVICE with the output of its program (`shaper` for the container that shapes links).",
    ),
    "exec": (
        "testbed_controller.cli.lab:execute",
        "Run COMMAND in the container of DEVICE and exit with its status.",
    ),
    "fault": (
        "testbed_controller.cli.changes:fault",
        "Inject faults into the devices and links of a running lab, and revert them.",
    ),
    "link": (
        "testbed_controller.cli.changes:link",
        "Show, change and measure the links of a running lab.",
    ),
    "show": (
        "testbed_controller.cli.catalogue:show",
        "List the methods, models, data sets and profiles available to scenarios, and print the schema.",
    ),
    "report": (
        "testbed_controller.cli.report:report",
        "Rebuild the report of a run from its events and print the summary.",
    ),
    "compare": (
        "testbed_controller.cli.report:compare",
        "Compare the metrics of runs side by side, each with its ratio to the first run.",
    ),
    "export": (
        "testbed_controller.cli.export:export",
        "Export the tables of a run, or a scenario as a Docker Compose project.",
    ),
    "doctor": (
        "testbed_controller.cli.machine:doctor",
        "Check this machine for the testbed's requirements, with a remedy for each problem.",
    ),
    "setup": (
        "testbed_controller.cli.machine:setup",
        "Prepare this machine: build images, inspect hosts, download data sets, measure a device profile.",
    ),
}
"""Name, import path and summary of each command; the object is imported on use."""
RENAMED = {
    "start": "testbed run SCENARIO --on",
    "schema": "testbed show schema",
    "models": "testbed show models",
    "methods": "testbed show methods",
    "profiles": "testbed show profiles",
    "profile": "testbed setup profile",
    "data": "testbed show data' or 'testbed setup data",
    "images": "testbed setup images",
    "hosts": "testbed setup hosts",
    "bench": "make bench' in a checkout, or 'python -m tools.bench",
}
"""Former names of commands, with the command lines that replace them.

The message puts each value in single quotes, so a value with two commands contains the inner quotes.
"""
GROUP = "testbed.commands"
"""Entry point group of commands in installed packages: ``name = "module:command"``, with click commands."""

_SIGPIPE_STATUS = 128 + signal.SIGPIPE
"""Exit status of a program whose output is no longer read, as shells report it."""


def _require_command(candidate: object) -> click.Command:
    if not isinstance(candidate, click.Command):
        raise TypeError(f"{candidate!r} must be a click.Command")
    return candidate


@contextmanager
def _exit_on_closed_pipe() -> Iterator[None]:
    """Exit quietly once the reader of the output has closed the pipe, as in `testbed ps | head`.

    Click's `main` would exit with status 1, the status of a failed run.
    """
    try:
        yield
    except BrokenPipeError:
        # Python flushes standard output at exit, and would report the same error again for the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_SIGPIPE_STATUS)


class _LazyGroup(CommandGroup):
    """A command group whose subcommands are imported on use."""

    renamed = RENAMED

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Parse the options of the group, where `--help` and `--version` print their text."""
        with _exit_on_closed_pipe():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen subcommand, whose own options are parsed here."""
        with _exit_on_closed_pipe():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list({**COMMANDS, **plugins.installed(GROUP)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            point = plugins.installed(GROUP).get(cmd_name)
            if point is None:
                return None
            return plugins.load(point, (), _require_command)
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def describe(self, ctx: click.Context, name: str) -> str:
        """Return the line of a command in the list."""
        if name in COMMANDS:
            return COMMANDS[name][1]
        try:
            return super().describe(ctx, name)
        except InputError as error:
            # A broken package must not hide the commands of other packages.
            return str(error)


@click.group(
    cls=_LazyGroup,
    # By default, click wraps help at 80 columns, also in a wider terminal.
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(VERSION, prog_name="testbed")
@click.option(
    "--log-level",
    type=click.Choice(LEVELS),
    default="warning",
    show_default=True,
    envvar=LEVEL,
    show_envvar=True,
    help="Lowest level logged to standard error. Logs in results folders contain info and above, with `debug` all.",
)
@click.pass_context
def testbed(context: click.Context, log_level: str) -> None:
    """Emulate edge devices and their links on one machine and run split neural networks on them."""
    log_to_terminal(log_level)
    if context.invoked_subcommand != "down":
        _suggest_removal()


class _TerminalHandler(logging.Handler):
    """Handler writing to the current standard error, which a live display may have redirected."""

    def emit(self, record: logging.LogRecord) -> None:
        lines = self.format(record).splitlines()
        click.echo("\n".join(escape_control(line) for line in lines), err=True)


_TERMINAL = _TerminalHandler()


def log_to_terminal(level: str) -> None:
    """Log to the terminal at the given level and above."""
    _TERMINAL.setLevel(level.upper())
    _TERMINAL.setFormatter(LineFormatter())
    for name in PACKAGES:
        logger = logging.getLogger(name)
        # Log files in results folders have handlers that record info and above, also if the terminal shows less.
        logger.setLevel(min(_TERMINAL.level, logging.INFO))
        logger.addHandler(_TERMINAL)


def _suggest_removal() -> None:
    """Suggest the removal of abandoned runs."""
    for run in orphaned_runs():
        text = "was killed, and its containers remain: remove them with"
        click.echo(f"testbed: the run {run} {text} 'testbed down {run}'", err=True)


def _drop_interrupt(unraisable: sys.UnraisableHookArgs) -> None:
    """Silence a KeyboardInterrupt raised inside ``__del__``, where Python can only print the exception."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


def main() -> None:
    """Run the command line; print a `TestbedError`, a line for each problem, and exit with the error's status."""
    collect_garbage_rarely()
    atexit.register(skip_garbage_at_exit)
    # Handled like Ctrl-C, so that the partial results of a run are written.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    sys.unraisablehook = _drop_interrupt
    try:
        sys.exit(testbed.main(standalone_mode=False))
    except click.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except TestbedError as error:
        click.echo(f"testbed: {escape_control(str(error))}", err=True)
        sys.exit(error.exit_code)
    except Exception as error:
        text, status = _explain_error(error)
        if text is None:
            raise
        click.echo(f"testbed: {escape_control(text)}", err=True)
        sys.exit(status)


def _explain_error(error: Exception) -> tuple[str | None, int]:
    """Return message and exit status for an error of a library or of the user's code; None shows the traceback."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        text = "the disk is full; written results of a run are kept, and `testbed report` rebuilds its page from them"
        return text, HostError.exit_code
    # By module name, since only some commands import the engine's client. Its errors concern this host.
    if type(error).__module__.startswith(("docker.", "requests.", "urllib3.")):
        text = " ".join(str(error).split())
        return f"the container engine: {text}", HostError.exit_code
    from testbed.common.usercode import describe_error

    explanation = describe_error(error)
    if explanation is None and isinstance(
        error, PermissionError | IsADirectoryError | FileExistsError
    ):
        text = f"{error.filename}: {error.strerror}: name another path"
        return text, HostError.exit_code
    return explanation, TestbedError.exit_code
