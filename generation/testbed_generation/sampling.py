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
        sorted_probabilities, tokens = probabilities.sort(descending=True)
        # A token is kept if all more probable tokens together have less than `top_p`. The most probable token is always
        # kept, since this sum is 0.
        sums_before = sorted_probabilities.cumsum(dim=-1) - sorted_probabilities
        kept_probabilities = torch.where(
            sums_before < self.top_p, sorted_probabilities, 0.0
        )
        generator = torch.Generator().manual_seed(
            derive(self.seed, "token", request, position)
        )
        index = torch.multinomial(kept_probabilities, 1, generator=generator)
        return int(tokens[index])
