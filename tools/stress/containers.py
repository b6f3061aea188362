"""Random scenarios on containers: held against the oracles of any run, and against the same run on the virtual clock.

What both clocks must agree on is what no time decides: the losses and weights of synchronous training, the answers of
inference. A container's log must have no traceback, and nothing may be left of a run.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from testbed.common.errors import InputError
from testbed.ml.data import load
from testbed.ml.preparation import part_of
from testbed.network.checks import SHAPER
from testbed.prepare import Prepared
from testbed.trace.outcome import Outcome
from testbed_controller.lab import runstate
from testbed_controller.lab.containers import container_logs
from testbed_controller.lab.engine import connect
from testbed_controller.lab.lab import Lab
from testbed_controller.lab.removal import labelled_runs
from testbed_controller.running.emulation import emulate
from tools.stress.check import held_against, of_any_run, one_line, run, same_weights
from tools.stress.generate import INFERENCE, SYNCHRONOUS, Tree

LONGEST = 240
"""Seconds that a run on containers may take before it counts as hanging, its lab included."""
TIME_LIMIT = 120.0
"""Seconds, the scenario's own limit; a run that reaches it counts as hanging too."""
MOST_VIRTUAL = 20.0
"""Seconds on the virtual clock; scenarios that take longer are left to it, since real time is dear."""
PATIENCE = 20.0
"""Seconds after which what the engine still holds of a run has been left behind."""


def violations(tree: Tree) -> list[str]:
    """Run a scenario on containers and return what must not be; ``["refused: ..."]`` where it is none or too long."""
    return held_against(
        {**tree, "time_limit": f"{TIME_LIMIT:g}s"}, _on_containers, LONGEST
    )


def _on_containers(prepared: Prepared) -> Iterator[str]:
    virtual = run(prepared)
    if (
        seconds := max((event.time for event in virtual.events), default=0.0)
    ) > MOST_VIRTUAL:
        yield f"refused: takes {seconds:.0f} s on the virtual clock"
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder  # no run of anybody else's is counted
        lab = Lab.create(prepared.trial)
        try:
            dataset = load(part_of(prepared.scenario).data)
            outcome = emulate(prepared, dataset, standing=lab, accept_links=True)
            yield from _logged(lab)
        finally:
            lab.down()
        yield from of_any_run(prepared, outcome)
        yield from as_virtual(prepared, outcome, virtual)
        yield from _left(lab.run_id, Path(folder))


def as_virtual(prepared: Prepared, real: Outcome, virtual: Outcome) -> Iterator[str]:
    """Yield where a run on containers differs from the virtual clock in what no time decides."""
    if real.status != "finished" or virtual.status != "finished":
        return
    method = prepared.scenario.workload.method.name
    if method in (*SYNCHRONOUS, "single"):
        yield from same_losses(virtual, real, "step")
        yield from same_weights(virtual, real, "the virtual clock's")
    elif method in INFERENCE and not any(
        event.event == "failed" for each in (real, virtual) for event in each.events
    ):
        yield from same_losses(virtual, real, "evaluate")


def same_losses(virtual: Outcome, real: Outcome, of: str) -> Iterator[str]:
    """Yield where the last losses recorded for each step differ by more than rounding."""
    found, expected = (
        {
            event.fields.get("step"): event.fields["loss"]
            for event in outcome.events
            if event.event == of
        }
        for outcome in (real, virtual)
    )
    for step, loss in expected.items():
        if step not in found or not math.isclose(
            found[step], loss, rel_tol=1e-3, abs_tol=1e-5
        ):
            yield f"clocks: {of} {step} has loss {found.get(step)}, on the virtual clock {loss}"
            return


def _logged(lab: Lab) -> Iterator[str]:
    """Yield the tracebacks in the containers' logs."""
    for name in (*lab.devices, SHAPER):
        with suppress(InputError):
            log = b"".join(container_logs(connect(), lab.run_id, name)).decode(
                errors="replace"
            )
            if "Traceback" in log or "never retrieved" in log:
                yield f"traceback: {name} logged {one_line(log)}"


def _left(run_id: str, state: Path) -> Iterator[str]:
    """Yield that something is left of a run."""
    client, until = connect(), time.monotonic() + PATIENCE
    while run_id in labelled_runs(client) or run_id in runstate.runs():
        if time.monotonic() > until:
            yield f"left: {run_id} on the engine or in {[path.name for path in state.rglob('*')]}"
            return
        time.sleep(0.5)
