"""Store of partial values on a device, and its memory use."""

import asyncio

import pytest
import torch

from testbed.common.errors import TestbedError
from testbed_stahl.dataflow import Origin
from testbed_stahl.plan import Range
from testbed_stahl.request_work import Ledger, Store


def test_input_is_assembled_from_pieces_of_several_values():
    store = Store(Ledger("a", 1e6))
    origins = (Origin(0, Range(2, 4), 0), Origin(1, Range(0, 1), 2))

    async def fill():
        waiting = asyncio.create_task(store.wait_for_input(origins))
        await asyncio.sleep(0)
        store.put(0, 0, torch.arange(8.0).reshape(1, 8))
        await asyncio.sleep(0)
        assert not waiting.done()
        store.put(1, 0, torch.tensor([[9.0]]))
        return await waiting

    blocks = asyncio.run(fill())
    assert [part for part, _ in blocks] == [Range(0, 2), Range(2, 3)]
    assert torch.cat([values for _, values in blocks], dim=1).tolist() == [
        [2.0, 3.0, 9.0]
    ]


def test_sums_are_returned_in_device_order_and_released():
    ledger = Ledger("a", 1e6)
    store = Store(ledger)
    for device in (1, 0):
        store.put_sums(3, Range(0, 2), device, torch.full((1, 2), float(device)))
    assert ledger.activations == 16
    sums = asyncio.run(store.sums(3, Range(0, 2), 2))
    assert [tensor[0, 0].item() for tensor in sums] == [0.0, 1.0]
    assert (ledger.activations, ledger.peak) == (0, 16)


def test_clear_releases_memory_and_put_beyond_memory_is_rejected():
    ledger = Ledger("a", 40)
    store = Store(ledger)
    store.put(0, 0, torch.zeros(1, 8))
    store.clear()
    assert ledger.activations == 0
    store.put(0, 0, torch.zeros(1, 8))
    with pytest.raises(TestbedError, match="a has 40 B of memory"):
        store.put(1, 0, torch.zeros(1, 8))
