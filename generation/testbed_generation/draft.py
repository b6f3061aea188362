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

    cached_tokens: list[int] = field(default_factory=list)
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

        With another rule, the draft model would choose other tokens from the same probabilities, and the stages would
        reject these tokens.
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
        self, request: Request, text_tokens: Sequence[int], limit: int
    ) -> list[int]:
        """Return at most ``limit`` proposed tokens after ``text_tokens``, the prompt and all tokens chosen so far."""
        new_progress = _DraftProgress(caches=[Cache() for _ in self._layers])
        progress = self._requests.setdefault(request.number, new_progress)
        self._drop_rejected(progress, text_tokens)
        # The draft model has not computed these tokens of the text yet: the newest one, and possibly earlier ones.
        inputs = list(text_tokens[len(progress.cached_tokens) :])
        proposed: list[int] = []
        while len(proposed) < min(self._max_proposed, limit):
            past = len(progress.cached_tokens)
            layers_cost = self._model.layers_cost(len(self._layers), len(inputs), past)
            cost = layers_cost + self._model.output_cost(1)
            span = Span("draft", batch=request.number, micro=past + len(inputs) - 1)
            propose = partial(self._choose_next, progress, inputs, request.number)
            token = await self._device.compute(propose, cost, span)
            progress.cached_tokens += inputs
            proposed.append(token)
            inputs = [token]
        return proposed

    def forget_request(self, number: int) -> None:
        """Drop the caches of a request."""
        self._requests.pop(number, None)

    def _drop_rejected(
        self, progress: _DraftProgress, text_tokens: Sequence[int]
    ) -> None:
        """Drop the tokens differing from the text, and the newest token of the text, from the caches."""
        equal_tokens = 0
        # The newest token is computed again in any case, since its logits decide the first proposal.
        earlier_tokens = text_tokens[:-1]
        for cached, token in zip(progress.cached_tokens, earlier_tokens, strict=False):
            if cached != token:
                break
            equal_tokens += 1
        del progress.cached_tokens[equal_tokens:]
        for cache in progress.caches:
            cache.truncate(equal_tokens)

    def _choose_next(
        self, progress: _DraftProgress, inputs: Sequence[int], request: int
    ) -> int:
        """Append the tokens ``inputs`` to the caches, and return the next token."""
        epsilon = self._model.architecture.epsilon
        with torch.inference_mode():
            activations = embed(torch.tensor(inputs), self._embedding)
            for layer, cache in zip(self._layers, progress.caches, strict=True):
                activations = layer.forward(activations, cache)
            # Only the logits after the newest token decide.
            logits = score(activations[-1:], self._norm, self._output, epsilon)[0]
        # Position of the chosen token in the text; the stages use the same random number for this position.
        position = len(progress.cached_tokens) + len(inputs)
        return self._sampling.choose_token(logits, request, position)
