"""Runs one experiment in containers on the real clock: a lab, its links measured, a run on it, and its removal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from testbed.common.errors import HostError
from testbed.prepare import Prepared
from testbed.trace.events import Event
from testbed.trace.outcome import Outcome
from testbed_controller.hosts.lab import AnyLab, create_lab
from testbed_controller.hosts.placement import LabPart
from testbed_controller.lab import capability
from testbed_controller.running.execution import Execution
from testbed_controller.running.fidelity import since, verified
from testbed_controller.running.logs import controller_log, save_container_logs
from testbed_controller.shaping.backend import check_name

_LOG = logging.getLogger(__name__)


def emulate(
    prepared: Prepared,
    data: Any,
    on_event: Callable[[Event], None] = lambda _event: None,
    weights: Mapping[str, Any] | None = None,
    *,
    on_stage: Callable[[str], None] = lambda _text: None,
    links: str = "auto",
    accept_links: bool = False,
    keep: bool = False,
    results: Path | None = None,
    standing: AnyLab | None = None,
    where: LabPart | None = None,
) -> Outcome:
    """Create the lab, verify its links, run the method on it with its faults, and remove it.

    The first four arguments are those of `testbed.simulation.simulate`. ``links`` names the link backend. With
    ``keep`` the lab stays up afterwards. ``standing`` is a lab that is up, and stays so. ``where`` names the hosts
    of several engines to run on. Raises
    HostError where the lab cannot be had; `LinksError` when a link is outside its tolerance and not
    accepted so; InputError where a link asks for more than this host was measured to carry.
    """
    where = where or LabPart()
    check_name(links)
    began = time.monotonic()
    if not accept_links and standing is None and not where.hosts:
        capability.check(prepared.experiment, links)

    def stage(text: str) -> None:
        _LOG.info("%s", text)
        on_stage(text)

    with ExitStack() as stack:
        if results is not None:
            stack.enter_context(controller_log(results))
        if standing is None:
            lab = create_lab(prepared.trial, where, links=links, progress=stage, results=results, keep=keep)
            if not keep:
                stack.callback(_remove, lab, stage)
        else:
            lab = standing
        if results is not None:
            lab.note_results(results)
            stack.callback(save_container_logs, lab, results)
        stage("measuring the links")
        measured = verified(lab.shaper.probe, list(prepared.experiment.links), accept_links)
        stage("handing out the work")
        # Asked for before the run: what it has found must not be lost if nothing answers after it.
        facts, before = lab.facts(), lab.shaper.statistics(reset=True)
        outcome = Execution(lab, prepared, data, weights, on_event).run(stage)
        _LOG.info("the run is %s%s", outcome.status, f": {outcome.error}" if outcome.error else "")
        outcome.links = measured
        _note_host(outcome, lab, facts, before)
        if keep or standing is not None:
            stage(f"the lab stays up: testbed down {lab.run_id}")
    outcome.wall_seconds = time.monotonic() - began
    return outcome


def _note_host(outcome: Outcome, lab: AnyLab, facts: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Add the facts of the hosts, and the statistics of the links since before the run."""
    outcome.host |= facts
    with suppress(HostError):
        outcome.fidelity |= since(before, lab.shaper.statistics())
    unlimited: set[str] = set()
    for host in facts.get("hosts", {"": facts}).values():
        unlimited.update(host["engine"]["unlimited"])
    outcome.fidelity["unlimited"] = sorted(unlimited)


def _remove(lab: AnyLab, on_stage: Callable[[str], None]) -> None:
    on_stage("removing the containers")
    if not lab.down():
        on_stage("what is left is removed in the background, as soon as the engine answers")
