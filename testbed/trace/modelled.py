"""Link properties that the virtual clock does not model, or models less exactly."""

from __future__ import annotations

from testbed.experiment import Experiment
from testbed.faults.link_actions import Degrade
from testbed.network.impairments import expected_loss
from testbed.network.link import Link
from testbed.network.parts import LinkPart

MAX_LOSS = 0.05
"""Share of lost packets up to which messages take as long as in containers, within 15 % (docs/fidelity.md)."""
MIN_DELAY = 0.01
"""One-way delay in seconds from which `MAX_LOSS` applies. Below, any loss is modelled less exactly, because a time-out
of TCP lasts a hundred round trips."""
MAX_JITTER = 0.3
"""Jitter, as a share of the delay, up to which messages take as long as in containers. Beyond, TCP regards overtaken
packets as lost."""


def unmodelled_effects(experiment: Experiment) -> list[str]:
    """Return a text for each link property not modelled by the virtual clock."""
    # A mesh of a thousand devices has a million pairs, which share few `Link` objects: each object is checked once.
    links = list({id(link): link for link in experiment.links.values()}.values())
    changes = _changed_properties(experiment)
    links_and_changes: list[Link | LinkPart] = [*links, *changes]
    texts = []
    if any(each.limit is not None for each in links_and_changes):
        texts.append("queue limits")
    if any(each.duplicate for each in links_and_changes):
        texts.append("packets that arrive twice")
    changed_losses = [change.loss or 0.0 for change in changes]
    if any(map(_loses_much, links)) or max(changed_losses, default=0.0) > MAX_LOSS:
        texts.append(
            f"TCP where more than {MAX_LOSS:.0%} of the packets are lost, "
            f"or any on links of less than {MIN_DELAY * 1e3:g} ms"
        )
    if any(link.jitter > MAX_JITTER * link.delay for link in links):
        texts.append(f"TCP where the jitter is more than {MAX_JITTER:.0%} of the delay")
    return texts


def _changed_properties(experiment: Experiment) -> list[LinkPart]:
    """Return the properties given to links by faults and the link trace during the run."""
    changes: list[LinkPart] = []
    for fault in experiment.faults:
        if isinstance(fault.action, Degrade):
            changes.append(fault.action.value)
    for change in experiment.changes:
        if change.link is not None:
            changes.append(change.link)
    return changes


def _loses_much(link: Link) -> bool:
    max_loss = MAX_LOSS if link.delay >= MIN_DELAY else 0.0
    # Rounded, since a loss of 5 % is computed as 5.000000000000004 %.
    return round(expected_loss(link), 9) > max_loss
