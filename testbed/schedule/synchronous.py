"""Schedules of synchronous pipelines: all micro-batches of a step see the same weights, and an update ends the step.

So each gives the gradient of the whole batch, whatever the order. Drawn for three stages and four micro-batches,
forward and backward equally long, with `testbed.schedule.grid`.

The micro-batches of a batch that does not divide differ by one sample (`testbed.data.batches.micro_batches`); the
schedules do not care.
"""

from __future__ import annotations

from collections.abc import Iterator

from testbed.schedule.actions import Action, Schedule


def _forward(micro: int) -> Action:
    return Action("forward", micro)


def _backward(micro: int) -> Action:
    return Action("backward", micro)


def model_parallelism(stages: int, stage: int, micro_batches: int) -> Iterator[Action]:
    """One micro-batch at a time through all stages and back: no pipelining.

    ::

        stage 0  F0  .  .  .  . B0 F1  .  .  .  . B1 F2  .  .  .  . B2 F3  .  .  .  . B3
        stage 1   . F0  .  . B0  .  . F1  .  . B1  .  . F2  .  . B2  .  . F3  .  . B3  .
        stage 2   .  . F0 B0  .  .  .  . F1 B1  .  .  .  . F2 B2  .  .  .  . F3 B3  .  .
    """
    for micro in range(micro_batches):
        yield _forward(micro)
        yield _backward(micro)


def gpipe(stages: int, stage: int, micro_batches: int) -> Iterator[Action]:
    """All forwards, then all backwards, the last micro-batch first (Huang et al., 2019, figure 2c).

    Every stage keeps the activations of all micro-batches. ::

        stage 0  F0 F1 F2 F3  .  .  .  . B3 B2 B1 B0
        stage 1   . F0 F1 F2 F3  .  . B3 B2 B1 B0  .
        stage 2   .  . F0 F1 F2 F3 B3 B2 B1 B0  .  .
    """
    yield from map(_forward, range(micro_batches))
    yield from map(_backward, reversed(range(micro_batches)))


def one_forward_one_backward(stages: int, stage: int, micro_batches: int) -> Iterator[Action]:
    """As many forwards as there are stages from here on, then a backward and a forward in turn (PipeDream-flush).

    As long as GPipe's when forwards, backwards and transfers are even, but stage i of n keeps the activations of n - i
    micro-batches only. ::

        stage 0  F0 F1 F2  .  . B0 F3 B1  . B2  . B3
        stage 1   . F0 F1  . B0 F2 B1 F3 B2  . B3  .
        stage 2   .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .
    """
    ahead = min(micro_batches, stages - stage)
    yield from map(_forward, range(ahead))
    for micro in range(micro_batches):
        yield _backward(micro)
        if ahead + micro < micro_batches:
            yield _forward(ahead + micro)


SCHEDULES: dict[str, Schedule] = {
    "model-parallelism": model_parallelism,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}
"""By the names that scenarios use."""
