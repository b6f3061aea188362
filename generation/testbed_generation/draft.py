"""Speculative decoding (Leviathan et al., 2023): a small model on the coordinator proposes tokens for the stages.

Proposed tokens are accepted up to the first token that the stages would not choose, so the text is that without a
draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from testbed.device import Device, Span
from testbed_generation.costs import CostModel
from testbed_generation.requests import Request
from testbed_generation.sampling import Sampling
from testbed_generation.transformer import Cache, LayerShard, embed, score
from testbed_generation.weights import EMBEDDING, NORM, OUTPUT, WeightSource, read_layer


@dataclass
class _DraftProgress:
    """The draft model's state of a request."""

    tokens: list[int] = field(default_factory=list)
    """Tokens in the caches, prompt included."""
    caches: list[Cache] = field(default_factory=list)


class Draft:
    """The draft model on the coordinator."""

    def __init__(
        self,
        device: Device,
        model: CostModel,
        max_proposed: int,
        sampling: Sampling,
        weight_source: WeightSource,
    ) -> None:
        """``max_proposed`` is the maximum number of tokens proposed at once, ``sampling`` the rule of the stages.

        With another rule, the same probabilities would give other tokens, which the stages reject.
        """
        architecture = model.architecture
        self._device = device
        self._model = model
        self._max_proposed = max_proposed
        self._sampling = sampling
        self._layers = []
        for layer in range(architecture.layers):
            weights = read_layer(weight_source, architecture, layer)
            self._layers.append(LayerShard(architecture, weights))
        self._embedding = weight_source.read(EMBEDDING)
        self._norm = weight_source.read(NORM)
        self._output = weight_source.read(EMBEDDING if architecture.tied else OUTPUT)
        self._requests: dict[int, _DraftProgress] = {}

    async def propose_tokens(
        self, request: Request, known: Sequence[int], limit: int
    ) -> list[int]:
        """Return the draft model's proposal of the tokens after the known ones, at most ``limit``."""
        new_progress = _DraftProgress([], [Cache() for _ in self._layers])
        progress = self._requests.setdefault(request.number, new_progress)
        self._keep_common(progress, known)
        # Known tokens that the draft model has not computed yet: at least the newest one.
        new = list(known[len(progress.tokens) :])
        proposed: list[int] = []
        while len(proposed) < min(self._max_proposed, limit):
            past = len(progress.tokens)
            layers = self._model.layers_cost(len(self._layers), len(new), past)
            cost = layers + self._model.output_cost(1)
            span = Span("draft", batch=request.number, micro=past + len(new) - 1)
            propose = partial(self._choose_next, progress, new, request.number)
            token = await self._device.compute(propose, cost, span)
            progress.tokens += new
            proposed.append(token)
            # The next proposal needs this token in the caches.
            new = [token]
        return proposed

    def forget_request(self, number: int) -> None:
        """Drop the caches of a request."""
        self._requests.pop(number, None)

    def _keep_common(self, progress: _DraftProgress, known: Sequence[int]) -> None:
        """Drop rejected tokens, and the newest known token, from the caches."""
        common = 0
        # The newest known token is computed again, since its logits decide the first proposal.
        for cached, token in zip(progress.tokens, known[:-1], strict=False):
            if cached != token:
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
            activations = embed(torch.tensor(new), self._embedding)
            for layer, cache in zip(self._layers, progress.caches, strict=True):
                activations = layer.forward(activations, cache)
            last = activations[-1:]
            logits = score(last, self._norm, self._output, epsilon)[0]
        # Position of the chosen token in the text; the stages use the same random number for this position.
        position = len(progress.tokens) + len(new)
        return self._sampling.choose_token(logits, request, position)
