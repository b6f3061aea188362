"""`testbed watch`: a run in the browser while it goes on."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import click


@click.command()
@click.argument("run", required=False, metavar="[RUN]")
@click.option("--pace", type=click.FloatRange(min=0, min_open=True), help="Seconds of the run to show in each second.")
@click.option("--open/--no-open", "show_page", default=True, help="Open the page in a browser.  [default: open]")
def watch(run: str | None, pace: float | None, show_page: bool) -> None:
    """Show RUN on a page in the browser: devices, links, learning, what each device does, and faults as they strike.

    RUN is a run that is up (default: the only one), or a folder of results, which is replayed at --pace (1: real time).
    While a run is up, faults can be injected from the page. It is served on 127.0.0.1 until Ctrl-C.

    \b
    Examples:
      testbed watch
      testbed watch results/quickstart --pace 5
    """
    from controller.lab import runstate
    from controller.running.control import strike
    from controller.watch.server import PageServer
    from testbed.common.errors import InputError

    if run is not None and Path(run).is_dir():
        server = PageServer(Path(run), pace=pace or 1.0)
    else:
        state = runstate.read(runstate.choose(run))
        if state.results is None:
            raise InputError(f"{state.run} is a lab without a run: start one with 'testbed run'")
        server = PageServer(Path(state.results), partial(strike, state.run), pace)
    click.echo(server.address)
    if show_page:
        server.show()
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)
    server.close()
