"""Checkpoints are put together unit by unit."""

import torch

from testbed.kits.pipeline.checkpointing import Collector


def test_checkpoint_is_complete_with_its_last_unit():
    collector = Collector(2)
    early, late = {"0.w": torch.tensor(1.0)}, {"1.w": torch.tensor(2.0)}
    assert collector.add(4, 1, late) is None
    assert collector.add(8, 1, late) is None
    assert collector.add(4, 1, late) is None
    done = collector.add(4, 0, early)
    assert done is not None
    assert done.step == 4
    assert done.state == early | late
    collector.clear()
    assert collector.add(8, 0, early) is None


def test_older_checkpoint_is_dropped_when_a_newer_one_is_complete():
    collector = Collector(2)
    collector.add(4, 0, {})
    collector.add(8, 0, {})
    assert collector.add(8, 1, {}).step == 8
    assert collector.add(4, 1, {}) is None
