"""Phase 3 of PipeLearn's optimisation (Zhang et al., III-C): the split point P and the parallel batch number N."""

from __future__ import annotations

import math
from functools import cache, partial

from testbed.kits.rounds.estimate import Choice, PairProfile, mini_batch
from testbed.kits.rounds.planner import Choices


def parallel_batches(profile: PairProfile, split: int, batch_size: int) -> int:
    """Return N for a split point P by equation (14), and no more than the batch has samples.

    As many more mini-batches as fill the time between the forward of one and its backward. The server's sums run over
    its own layers, P+1..Q; the equation as printed has 1..P for the forward.
    """
    whole = profile.durations(split, batch_size)
    idle = whole["upload"] + whole["server forward"] + whole["server backward"] + whole["download"]
    idle += profile.up.delay + profile.down.delay
    shorter = min(whole["forward"], whole["backward"])
    wanted = 1 + math.ceil(idle / shorter) if shorter > 0 else batch_size
    return min(wanted, batch_size)


def shortlist(profile: PairProfile, batch_size: int) -> tuple[Choice, ...]:
    """Return the paper's candidates: for each split point P = 1..Q the N of equation (14)."""
    return tuple(Choice(split, parallel_batches(profile, split, batch_size)) for split in range(1, profile.depth + 1))


def candidates(profile: PairProfile, batch_size: int, least: int = 1) -> tuple[Choice, ...]:
    """Return the shortlist, and for each size of a mini-batch the most that the batch gives, at every split point.

    Equation (14) stops where the device would no longer idle. Where a link is what holds up the pipeline, smaller
    mini-batches still shorten the time before it is busy and after it was. ``least`` is the
    fewest samples of a mini-batch.
    """
    found = [choice for choice in shortlist(profile, batch_size) if mini_batch(batch_size, choice.parallel) >= least]
    sizes = range(max(1, min(least, batch_size)), batch_size + 1)
    counts = sorted({batch_size // size for size in sizes})
    found += [Choice(split, count) for split in range(1, profile.depth + 1) for count in counts]
    return tuple(dict.fromkeys(found))


@cache
def choices(least: int, paper: bool) -> Choices:
    """Return what P and N are chosen from; ``paper``: equation (14) alone says what N may be.

    The same function for equal arguments, so that the planner knows what it has worked out for a device like another.
    """
    return shortlist if paper else partial(candidates, least=least)
