"""Tokens of whole numbers, and a network that looks them up: read by tests as the file of a scenario."""

import torch
from torch import nn

SCENARIO = """\
name: tokens
seed: 1
devices:
  source: {profile: laptop}
  worker: {profile: laptop}
network:
  link: {rate: 100mbit, delay: 1ms}
workload:
  model: {file: own_tokens.py, name: Text}
  data: {file: own_tokens.py, name: load}
  method: {name: pipeline}
  training: {optimizer: {learning_rate: 0.5}}
  batch_size: 20
  steps: 12
time_limit: 100s
"""


class Text(nn.Module):
    """Guesses by the mean of what it looks up."""

    def __init__(self, classes):
        super().__init__()
        self.table = nn.Embedding(30, 16)
        self.hidden = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        """Map tokens (samples, places) to (samples, classes)."""
        return self.head(self.norm(torch.relu(self.hidden(self.table(x)))).mean(1))


def load():
    """Return samples of seven tokens, whose labels are their first token's remainder."""
    tokens = torch.randint(0, 30, (300, 7), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 0] % 3
    return (tokens[:200], labels[:200]), (tokens[200:], labels[200:])
