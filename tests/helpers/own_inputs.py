"""Samples of two inputs, tokens and which of them count, and networks of both: tests read it as a scenario's file."""

import torch
from torch import nn


class Masked(nn.Module):
    """Guesses by the mean of the tokens that count, after layers that look at those alone."""

    def __init__(self, classes):
        super().__init__()
        self.table = nn.Embedding(30, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(16, classes)

    def forward(self, input_ids, attention_mask):
        """Map two of (samples, places) to a dictionary, as models of others do."""
        values = self.table(input_ids)
        for layer in self.layers:
            values = layer(values, src_key_padding_mask=attention_mask == 0)
        counted = attention_mask.unsqueeze(2).float()
        return {"logits": self.head((values * counted).sum(1) / counted.sum(1))}


class Whole(Masked):
    """Takes its inputs as one dictionary."""

    def forward(self, batch):
        """Map a dictionary of two of (samples, places) to (samples, classes)."""
        return super().forward(batch["input_ids"], batch["attention_mask"])["logits"]


class Towers(nn.Module):
    """Two inputs of numbers, a network each, and one for both."""

    def __init__(self, classes):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        self.right = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(16, classes)

    def forward(self, first, second):
        """Map (samples, 6) and (samples, 3) to (samples, classes)."""
        return self.head(torch.cat([self.left(first), self.right(second)], dim=1))


def tokens():
    """Return samples of seven tokens, of which the first four to seven count: their first tells the class."""
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 30, (300, 7), generator=draws)
    mask = (torch.arange(7) < torch.randint(4, 8, (300, 1), generator=draws)).long()
    samples = {"input_ids": ids * mask, "attention_mask": mask}
    labels = ids[:, 0] % 3
    return tuple(
        ({name: each[part] for name, each in samples.items()}, labels[part])
        for part in PARTS
    )


def pairs():
    """Return samples of two inputs without names."""
    draws = torch.Generator().manual_seed(1)
    first, second = (
        torch.randn(300, 6, generator=draws),
        torch.randn(300, 3, generator=draws),
    )
    labels = (first.sum(1) > second.sum(1)).long()
    return tuple(((first[part], second[part]), labels[part]) for part in PARTS)


PARTS = (slice(200), slice(200, 300))
