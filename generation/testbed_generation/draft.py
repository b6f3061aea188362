"""Speculative decoding (Leviathan et al., 2023): a small model on the source proposes tokens that the stages verify.

Proposed tokens are accepted up to the first one that the stages would not choose, so the text is that without a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from testbed.device import Device, Span
from testbed_generation.costs import CostModel
from testbed_generation.network import Cache, LayerShard, embed, score
from testbed_generation.requests import Request
from testbed_generation.sampling import Sampling
from testbed_generation.weights import EMBEDDING, NORM, OUTPUT, Source, read_layer


@dataclass
class _DraftProgress:
    """The draft model's state of a request."""

    tokens: list[int] = field(default_factory=list)
    """Tokens in the caches, prompt included."""
    caches: list[Cache] = field(default_factory=list)


class Draft:
    """The draft model on the source."""

    def __init__(
        self,
        device: Device,
        model: CostModel,
        tokens: int,
        sampling: Sampling,
        source: Source,
    ) -> None:
        """``tokens`` is the maximum number of tokens proposed at once, ``sampling`` the rule of the stages.

        With another rule, the same probabilities would give other tokens, which the stages reject.
        """
        architecture = model.architecture
        self._device = device
        self._model = model
        self._tokens = tokens
        self._sampling = sampling
        self._layers = []
        for layer in range(architecture.layers):
            weights = read_layer(source, architecture, layer)
            self._layers.append(LayerShard(architecture, weights))
        self._embedding = source.read(EMBEDDING)
        self._norm = source.read(NORM)
        self._output = source.read(EMBEDDING if architecture.tied else OUTPUT)
        self._requests: dict[int, _DraftProgress] = {}

    async def propose_tokens(
        self, request: Request, known: Sequence[int], limit: int
    ) -> list[int]:
        """Return the draft model's choice of the tokens after the known ones, at most ``limit``."""
        empty = _DraftProgress([], [Cache() for _ in self._layers])
        progress = self._requests.setdefault(request.number, empty)
        self._keep_common(progress, known)
        # Known tokens that the draft model has not computed yet, the newest one at the least.
        new = list(known[len(progress.tokens) :])
        proposed: list[int] = []
        while len(proposed) < min(self._tokens, limit):
            past = len(progress.tokens)
            layers = self._model.layers_cost(len(self._layers), len(new), past)
            cost = layers + self._model.output_cost(1)
            span = Span("draft", batch=request.number, micro=past + len(new) - 1)
            propose = partial(self._choose_next, progress, new, request.number)
            token = await self._device.compute(propose, cost, span)
            progress.tokens += new
            proposed.append(token)
            # Each proposed token follows the one before it.
            new = [token]
        return proposed

    def forget_request(self, number: int) -> None:
        """Drop the caches of a request."""
        self._requests.pop(number, None)

    def _keep_common(self, progress: _DraftProgress, known: Sequence[int]) -> None:
        """Drop rejected tokens, and the newest known one, from the caches."""
        common = 0
        # The newest known token has not been fed to the draft model, so its caches cannot have it.
        for own, token in zip(progress.tokens, known[:-1], strict=False):
            if own != token:
                break
            common += 1
        del progress.tokens[common:]
        for cache in progress.caches:
            cache.truncate(common)

    def _choose_next(
        self, progress: _DraftProgress, new: Sequence[int], request: int
    ) -> int:
        """Return the token after the new ones, which are appended to the caches."""
        epsilon = self._model.architecture.epsilon
        with torch.inference_mode():
            values = embed(torch.tensor(new), self._embedding)
            for layer, cache in zip(self._layers, progress.caches, strict=True):
                values = layer.forward(values, cache)
            logits = score(values[-1:], self._norm, self._output, epsilon)[0]
        # The position of the chosen token in the text: stages draw by the same request and position.
        position = len(progress.tokens) + len(new)
        return self._sampling.choose_token(logits, request, position)
