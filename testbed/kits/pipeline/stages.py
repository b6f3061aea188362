"""The coordinator's side of stages in a row: telling them what to be, and supervising them."""

from __future__ import annotations

from functools import partial

from testbed.kits.layers import costs
from testbed.kits.layers.shard import State, restrict, weights_of
from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.messaging.membership import Presence
from testbed.kits.messaging.supervision import Supervisor, Timeouts
from testbed.kits.pipeline.arrangement import StagesOptions
from testbed.kits.pipeline.checkpointing import FromCheckpoint, Partitioner
from testbed.kits.pipeline.stage import Configure
from testbed.method import Job, Problem
from testbed.plan import Piece


def supervise_stages(
    mailbox: Mailbox, presence: Presence, problem: Problem[StagesOptions], standstill: float | None = None
) -> Supervisor:
    """Return what waits for the stages, as patiently as the options say.

    ``standstill``: seconds without anything done, though all answer; None: the ``return_window``.
    """
    options = problem.options
    timeouts = Timeouts(options.patience, options.return_window, standstill or options.return_window)
    return Supervisor(mailbox, presence, problem, timeouts, partial(backlog, problem))


def recover_stages(supervisor: Supervisor, job: Job, steps: int, partitioner: Partitioner) -> FromCheckpoint:
    """Set up the stages of the plan, to go on from checkpoints of which the last is exposed.

    ``steps`` are those of the whole training.
    """
    configure, units = partial(configure_stage, supervisor, steps), len(job.problem.model.units)
    recovery = FromCheckpoint(supervisor, configure, partitioner, units, job.weights)
    supervisor.device.expose(lambda: weights_of(recovery.checkpoint.state or {}))
    supervisor.start(job.plan.pieces)
    return recovery


def configure_stage(supervisor: Supervisor, steps: int, part: Piece, state: State | None) -> Configure:
    """Return the message that tells a device to be a stage, with its units of a state; None: from the seed."""
    given = {} if state is None else restrict(state, part.first, part.last)
    return Configure(supervisor.mailbox.configuration, supervisor.stages, steps, state is not None, given)


def backlog(problem: Problem, part: Piece) -> float:
    """Return how many bytes a stage may be sending to the coordinator: a checkpoint, and inputs."""
    workload, units = problem.workload, problem.model.units[part.first : part.last]
    return costs.state_bytes(units, workload.optimizer) + workload.batch_size * units[0].input_bytes
