"""Emulation of one experiment in containers on the real clock: lab, link measurement, run, removal."""

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
from testbed_controller.running.fidelity import statistics_since, verify_links
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
    existing_lab: AnyLab | None = None,
    placement: LabPart | None = None,
) -> Outcome:
    """Create the lab, verify the links, run the method with the scenario's faults, and remove the lab.

    The first four arguments are those of `testbed.simulation.simulate`. ``links`` names the link backend. ``keep``
    leaves the lab running afterwards. ``existing_lab`` is a running lab, which the run uses instead of a new one and
    leaves running. ``placement`` selects several hosts. Raises HostError if the lab cannot be created, `LinksError` if
    a link is outside its tolerance without ``accept_links``, and InputError if a link exceeds the measured capacity of
    this host.
    """
    placement = placement or LabPart()
    check_name(links)
    began = time.monotonic()
    # The measured capacity applies to this host alone.
    if not accept_links and existing_lab is None and not placement.hosts:
        capability.check_rates(prepared.experiment, links)

    def stage(text: str) -> None:
        _LOG.info("%s", text)
        on_stage(text)

    def create() -> AnyLab:
        lab = create_lab(
            prepared.trial,
            placement,
            links=links,
            progress=stage,
            results=results,
            keep=keep,
        )
        if not keep:
            stack.callback(_remove_lab, lab, stage)
        return lab

    # The stack calls its functions in reverse order: it saves the logs of the containers, removes the containers, and
    # closes the controller's log, which therefore contains the removal.
    with ExitStack() as stack:
        if results is not None:
            stack.enter_context(controller_log(results))
        lab = create() if existing_lab is None else existing_lab
        if results is not None:
            lab.note_results(results)
            stack.callback(save_container_logs, lab, results)
        stage("measuring the links")
        pairs = list(prepared.experiment.links)
        measured = verify_links(lab.shaper.probe, pairs, accept=accept_links)
        stage("deploying the programs")
        # Query the facts before the run: its results must not be lost if the engine does not respond afterwards.
        facts = lab.facts()
        statistics_before = lab.shaper.statistics(reset=True)
        outcome = Execution(lab, prepared, data, weights, on_event).run(stage)
        error = f": {outcome.error}" if outcome.error else ""
        _LOG.info("the run is %s%s", outcome.status, error)
        outcome.links = measured
        _note_host(outcome, lab, facts, statistics_before)
        if keep or existing_lab is not None:
            stage(f"the lab stays up; remove it with: testbed down {lab.run_id}")
    outcome.wall_seconds = time.monotonic() - began
    return outcome


def _note_host(
    outcome: Outcome,
    lab: AnyLab,
    facts: Mapping[str, Any],
    statistics_before: Mapping[str, Any],
) -> None:
    """Add facts about the hosts, and link statistics of the run, to the outcome."""
    outcome.host |= facts
    with suppress(HostError):
        outcome.fidelity |= statistics_since(statistics_before, lab.shaper.statistics())
    unlimited: set[str] = set()
    for host in facts.get("hosts", {"": facts}).values():
        unlimited.update(host["engine"]["unlimited"])
    outcome.fidelity["unlimited"] = sorted(unlimited)


def _remove_lab(lab: AnyLab, on_stage: Callable[[str], None]) -> None:
    on_stage("removing the containers")
    if not lab.down():
        on_stage(
            "the remaining containers are removed in the background when the engine responds"
        )
