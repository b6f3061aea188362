"""Sampling of the next token: the most probable token, or a random token by temperature and nucleus."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from testbed.common.seeds import derive


@dataclass(frozen=True)
class Sampling:
    """The rule by which tokens are chosen from logits.

    >>> Sampling().choose_token(torch.tensor([0.5, 2.0, 1.0]), request=0, position=7)
    1
    """

    temperature: float = 0.0
    """0: the most probable token is chosen; otherwise logits are divided by the temperature before the softmax."""
    top_p: float = 1.0
    """Tokens are drawn from the most probable tokens with this total probability (Holtzman et al., 2020)."""
    seed: int = 0

    def choose_token(self, logits: Tensor, request: int, position: int) -> int:
        """Return the token at a position of a request from logits of shape (vocabulary,).

        The random number depends on seed, request and position alone. Therefore a position that is computed again after
        a failure gets the same token.
        """
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities = torch.softmax(logits.double() / self.temperature, dim=-1)
        ordered, tokens = probabilities.sort(descending=True)
        # The most probable token is always kept, since the sum of the probabilities before it is 0.
        before = ordered.cumsum(dim=-1) - ordered
        ordered = torch.where(before < self.top_p, ordered, 0.0)
        generator = torch.Generator().manual_seed(
            derive(self.seed, "token", request, position)
        )
        return int(tokens[torch.multinomial(ordered, 1, generator=generator)])
