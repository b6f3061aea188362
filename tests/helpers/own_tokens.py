"""A user's file with a data set of integer tokens and a network that embeds them."""

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
    """Classifies by the mean of the embedded tokens."""

    def __init__(self, classes):
        super().__init__()
        self.table = nn.Embedding(30, 16)
        self.hidden = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        """Map tokens (samples, positions) to (samples, classes)."""
        hidden = torch.relu(self.hidden(self.table(x)))
        return self.head(self.norm(hidden).mean(1))


def load():
    """Return training and test samples of seven tokens; the label is the first token modulo 3."""
    tokens = torch.randint(0, 30, (300, 7), generator=torch.Generator().manual_seed(1))
    # A simple rule, so that the loss falls within the few steps of the scenario.
    labels = tokens[:, 0] % 3
    return (tokens[:200], labels[:200]), (tokens[200:], labels[200:])
