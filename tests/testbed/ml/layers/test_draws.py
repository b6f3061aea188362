"""Random numbers of micro-batches, which equal those of the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from testbed.ml.layers.draws import RowsOfBatch

BATCH = 12
LAYERS = {
    "dropout": (nn.Dropout(0.5), (BATCH, 6)),
    "channel-dropout": (nn.Dropout2d(0.5), (BATCH, 3, 4, 4)),
    "attention": (
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True),
        (BATCH, 5, 8),
    ),
}
"""By name: a layer and the shape of its inputs."""


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_micro_batches_draw_numbers_of_whole_batch(name: str, transposed: bool) -> None:
    layer, shape = LAYERS[name]
    inputs = torch.randn(shape)
    if transposed:
        # The same shape in another memory order, which torch's generator follows.
        inputs = inputs.transpose(1, -1).contiguous().transpose(1, -1)
    torch.manual_seed(1)
    expected = layer(inputs)
    outputs = []
    for first, last in ((0, 5), (5, 9), (9, BATCH)):
        torch.manual_seed(1)
        with RowsOfBatch(first, last - first, BATCH):
            outputs.append(layer(inputs[first:last]))
    assert torch.allclose(torch.cat(outputs), expected, atol=1e-6)
