"""Batches that a coordinator sends forward through the stages: requests and evaluations."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING

from testbed.kits.layers.feed import Requests
from testbed.kits.layers.score import Score
from testbed.kits.messaging.supervision import Supervisor
from testbed.kits.pipeline.stage import Activation, Output, Purpose

if TYPE_CHECKING:
    import torch


async def forward_all(
    supervisor: Supervisor,
    work: Purpose,
    wanted: Iterable[int],
    window: int,
    images: Callable[[int], torch.Tensor],
) -> AsyncIterator[tuple[int, torch.Tensor]]:
    """Send the wanted batches through the stages, ``window`` at a time; yield index and outputs of each.

    ``images`` is asked for a batch's inputs, (samples, channels, height, width), at the moment they are sent. Raises
    `Lost` when outputs cannot come any more.
    """
    mailbox = supervisor.mailbox
    waiting = deque(wanted)
    under_way: set[int] = set()
    while waiting or under_way:
        while waiting and len(under_way) < window:
            index = waiting.popleft()
            under_way.add(index)
            inputs = images(index)
            activation = Activation(mailbox.configuration, work, index, 0, 1, len(inputs), inputs)
            mailbox.post(supervisor.layout[0].device, activation)
        output = await supervisor.take(Output)
        under_way.remove(output.batch)
        supervisor.progress += 1
        yield output.batch, output.tensor


async def evaluate(supervisor: Supervisor, step: int, tests: Requests) -> None:
    """Send the test part through the stages, enough batches at once to keep them all busy; record the score."""
    score = Score()
    window = 2 * len(supervisor.layout)
    async for index, output in forward_all(supervisor, "evaluate", range(len(tests)), window, tests.images):
        score.add(output, tests.labels(index))
    supervisor.device.record("evaluate", step=step, **score.fields())
