"""A user's file with samples of two inputs, such as tokens and an attention mask, and networks for them."""

import torch
from torch import nn

PARTS = (slice(200), slice(200, 300))
"""Training samples and test samples of 300."""


class Masked(nn.Module):
    """Classifies by the mean over unmasked tokens; its layers attend to unmasked tokens only."""

    def __init__(self, classes):
        super().__init__()
        self.table = nn.Embedding(30, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(16, classes)

    def forward(self, input_ids, attention_mask):
        """Map two tensors (samples, positions) to a dictionary with logits, as models of transformers do."""
        values = self.table(input_ids)
        for layer in self.layers:
            values = layer(values, src_key_padding_mask=attention_mask == 0)
        counted = attention_mask.unsqueeze(2).float()
        return {"logits": self.head((values * counted).sum(1) / counted.sum(1))}


class Whole(Masked):
    """Receives its inputs as one dictionary."""

    def forward(self, batch):
        """Map a dictionary of two tensors (samples, positions) to (samples, classes)."""
        return super().forward(batch["input_ids"], batch["attention_mask"])["logits"]


class Towers(nn.Module):
    """Processes each of two numeric inputs by its own network, and both results by a third."""

    def __init__(self, classes):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        self.right = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(16, classes)

    def forward(self, first, second):
        """Map (samples, 6) and (samples, 3) to (samples, classes)."""
        return self.head(torch.cat([self.left(first), self.right(second)], dim=1))


def tokens():
    """Return training and test samples of 4 to 7 tokens, padded to 7; the first token determines the label."""
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 30, (300, 7), generator=draws)
    lengths = torch.randint(4, 8, (300, 1), generator=draws)
    # Padding has the token 0 and the mask 0.
    mask = (torch.arange(7) < lengths).long()
    ids, labels = ids * mask, ids[:, 0] % 3
    parts = []
    for part in PARTS:
        samples = {"input_ids": ids[part], "attention_mask": mask[part]}
        parts.append((samples, labels[part]))
    return tuple(parts)


def pairs():
    """Return training and test samples of two unnamed inputs."""
    draws = torch.Generator().manual_seed(1)
    first = torch.randn(300, 6, generator=draws)
    second = torch.randn(300, 3, generator=draws)
    # The label depends on both inputs, so a network that ignores one cannot learn it.
    labels = (first.sum(1) > second.sum(1)).long()
    return tuple(((first[part], second[part]), labels[part]) for part in PARTS)
