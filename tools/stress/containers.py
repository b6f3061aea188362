"""Random scenarios on containers, checked by the oracles and compared with the same run on the virtual clock.

Both clocks must agree on values that do not depend on timing: losses and weights of synchronous training, and answers
of inference. Logs of containers must contain no traceback, and nothing may remain of a run.
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
from testbed.ml.preparation import workload_section
from testbed.network.checks import SHAPER
from testbed.prepare import Prepared
from testbed.trace.outcome import Outcome
from testbed_controller.lab import runstate
from testbed_controller.lab.containers import container_logs
from testbed_controller.lab.engine import connect
from testbed_controller.lab.lab import Lab
from testbed_controller.lab.removal import labelled_runs
from testbed_controller.running.emulation import emulate
from tools.stress.check import (
    apply_oracles,
    check_run,
    compare_weights,
    one_line,
    simulate_trial,
)
from tools.stress.generate import INFERENCE, SYNCHRONOUS, Tree

HANG_SECONDS = 240
"""Seconds after which a run on containers, including the creation of its lab, counts as hanging."""
TIME_LIMIT = 120.0
"""Time limit of the scenario in seconds; a run that reaches this limit counts as hanging as well."""
MAX_VIRTUAL_SECONDS = 20.0
"""Maximum duration of a scenario on the virtual clock, in seconds; a run on containers takes as much real time."""
PATIENCE = 20.0
"""Seconds in which the remains of a run must disappear."""


def find_violations(tree: Tree) -> list[str]:
    """Run a scenario on containers and return the violations; ``["refused: ..."]`` if invalid or too long."""
    limited = {**tree, "time_limit": f"{TIME_LIMIT:g}s"}
    return apply_oracles(limited, _check_containers, HANG_SECONDS)


def _check_containers(prepared: Prepared) -> Iterator[str]:
    # First on the virtual clock, which takes little time and shows whether the scenario is too long.
    virtual = simulate_trial(prepared)
    seconds = max((event.time for event in virtual.events), default=0.0)
    if seconds > MAX_VIRTUAL_SECONDS:
        yield f"refused: takes {seconds:.0f} s on the virtual clock"
        return
    with tempfile.TemporaryDirectory() as folder:
        # A separate state folder, so that other runs are not counted.
        os.environ["XDG_STATE_HOME"] = folder
        lab = Lab.create(prepared.trial)
        try:
            dataset = load(workload_section(prepared.scenario).data)
            # On a lab created before, since the removal of a lab deletes the logs.
            outcome = emulate(prepared, dataset, existing_lab=lab, accept_links=True)
            yield from _check_logs(lab)
        finally:
            lab.down()
        yield from check_run(prepared, outcome)
        yield from compare_with_virtual(prepared, outcome, virtual)
        yield from _check_removal(lab.run_id, Path(folder))


def compare_with_virtual(
    prepared: Prepared, real: Outcome, virtual: Outcome
) -> Iterator[str]:
    """Yield differences between both clocks in values independent of timing."""
    if real.status != "finished" or virtual.status != "finished":
        return
    method = prepared.scenario.workload.method.name
    if method in (*SYNCHRONOUS, "single"):
        yield from compare_losses(virtual, real, "step")
        yield from compare_weights(virtual, real, "the weights on the virtual clock")
    # Which requests fail depends on timing.
    elif method in INFERENCE and not (_has_failed(real) or _has_failed(virtual)):
        yield from compare_losses(virtual, real, "evaluate")


def _has_failed(outcome: Outcome) -> bool:
    return any(event.event == "failed" for event in outcome.events)


def compare_losses(virtual: Outcome, real: Outcome, kind: str) -> Iterator[str]:
    """Yield the first step whose last recorded losses differ by more than rounding."""
    real_losses = _last_losses(real, kind)
    for step, loss in _last_losses(virtual, kind).items():
        real_loss = real_losses.get(step, math.nan)
        if not math.isclose(real_loss, loss, rel_tol=1e-3, abs_tol=1e-5):
            yield f"clocks: {kind} {step} has loss {real_losses.get(step)}, on the virtual clock {loss}"
            return


def _last_losses(outcome: Outcome, kind: str) -> dict[int | None, float]:
    losses = {}
    for event in outcome.events:
        if event.event == kind:
            # The last computation of a step counts, since a step may be repeated after a failure.
            losses[event.fields.get("step")] = event.fields["loss"]
    return losses


def _check_logs(lab: Lab) -> Iterator[str]:
    """Yield the tracebacks in the containers' logs."""
    for name in (*lab.devices, SHAPER):
        # Raised for a container that a fault has removed.
        with suppress(InputError):
            content = b"".join(container_logs(connect(), lab.run_id, name))
            log = content.decode(errors="replace")
            if "Traceback" in log or "never retrieved" in log:
                yield f"traceback: {name} logged {one_line(log)}"


def _check_removal(run_id: str, state: Path) -> Iterator[str]:
    """Yield a violation if a run still has containers, networks or state after `PATIENCE` seconds."""
    client = connect()
    until = time.monotonic() + PATIENCE
    while run_id in labelled_runs(client) or run_id in runstate.runs():
        if time.monotonic() > until:
            yield f"left: {run_id} on the engine or in {[path.name for path in state.rglob('*')]}"
            return
        time.sleep(0.5)
