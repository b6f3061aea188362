"""What some rows of a batch draw is what the batch draws, however its values lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from testbed.ml.layers.draws import RowsOfBatch

KINDS = {
    "dropout": (nn.Dropout(0.5), (12, 6)),
    "of channels": (nn.Dropout2d(0.5), (12, 3, 4, 4)),
    "attention": (
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True),
        (12, 5, 8),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turned", [False, True])
def test_parts_draw_what_the_whole_does(kind, turned):
    module, shape = KINDS[kind]
    values = torch.randn(shape)
    if turned:
        values = values.transpose(1, -1).contiguous().transpose(1, -1)
    torch.manual_seed(1)
    whole = module(values)
    parts = []
    for begin, end in ((0, 5), (5, 9), (9, 12)):
        torch.manual_seed(1)
        with RowsOfBatch(begin, end - begin, 12):
            parts.append(module(values[begin:end]))
    assert torch.allclose(torch.cat(parts), whole, atol=1e-6)
