"""`testbed bench`: what the testbed itself costs on this machine, measured by `tools.bench` of a checkout."""

from __future__ import annotations

import os
import subprocess
import sys

import click


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[PART]... [--json] [--out FILE]")
def bench(arguments: tuple[str, ...]) -> None:
    """Measure what the testbed costs here, in these parts, each figure beside its target.

    clocks: speed of the simulator; the quickstart emulated against simulated. pacing: whether work takes what it is
    charged, on an idle and on a loaded host. transfer: tensors and small messages on
    real links. gloo: a step of our pipeline against torch's own over gloo and against the plan. memory: of idle and
    working devices. startup: devices up and shaped against bare containers.
    conformance: links requested and achieved, by backend. All of them by default, a quarter of an hour. Run it on an
    idle machine: what else runs here is in the figures. Needs a checkout of the repository.

    --json prints the figures as JSON, --out FILE writes that to a file as well.

    \b
    Example:
      testbed bench transfer memory --json
    """
    from controller.lab.paths import CHECKOUT
    from testbed.common.errors import HostError

    if not (CHECKOUT / "tools/bench").is_dir():
        raise HostError("the bench is part of a checkout: clone the repository and run 'make bench' there")
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    sys.exit(subprocess.call([sys.executable, "-m", "tools.bench", *arguments], env=environment))
