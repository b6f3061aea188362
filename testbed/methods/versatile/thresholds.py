"""Dynamic update (Section IV-C): stricter from stage to stage, as the loss no longer improves."""

from __future__ import annotations

import math

PATIENCE = 60
"""Steps without a better loss after which the next stage begins; the paper's."""
MOST_FORWARD = 0.5
FORWARD_STEP = 0.1
MOST_REUSE = 10


def forward_threshold(stage: int) -> float:
    """Return ``thres_fw`` of a stage, counted from 0: 0, then 0.1 more each, up to 0.5."""
    return min(MOST_FORWARD, round(stage * FORWARD_STEP, 9))


def reuse_limit(stage: int) -> int:
    """Return ``gradReuse_bw`` of a stage: 10, then 1 less each, down to 0."""
    return max(0, MOST_REUSE - stage)


class Stagnation:
    """Counts the stages, from the losses of training steps."""

    def __init__(self, patience: int = PATIENCE) -> None:
        self.stage = 0
        self._patience = patience
        self._best = math.inf
        self._since: int | None = None
        """Step of the best loss, or of the stage's begin if that is later."""

    def observe(self, step: int, loss: float) -> int:
        """Take the loss of a step, in the order of steps; return the stage from now on."""
        if self._since is None or loss < self._best:
            self._best, self._since = loss, step
        elif step - self._since >= self._patience:
            self.stage, self._since = self.stage + 1, step
        return self.stage
