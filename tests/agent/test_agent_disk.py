"""State that a device stores for its restarts."""

import pytest
import torch

from testbed.common.errors import HostError
from testbed.wire.message import Message
from testbed_agent.disk import Disk
from testbed_agent.settings import Settings


def open_disk(path, origin=12.5, **settings):
    """Open the disk of a device; a workload is identified by the origin of its time."""
    return Disk(Settings("run", "source", "token", disk=str(path), **settings), origin)


def state(step, **tensors):
    return Message("state", {"step": step}, tensors)


def test_later_start_reads_data_of_an_earlier_start(tmp_path):
    open_disk(tmp_path).save("state", state(3, w=torch.arange(4.0)))
    saved = open_disk(tmp_path).saved("state")
    assert saved is not None
    assert saved["step"] == 3
    assert torch.equal(saved.tensors["w"], torch.arange(4.0))


def test_partially_written_file_is_ignored(tmp_path):
    disk = open_disk(tmp_path)
    disk.save("state", state(1))
    disk.save("state", state(2))
    # The draft of a write that a power failure interrupted.
    (folder,) = tmp_path.iterdir()
    (folder / "state.part").write_bytes(b"half of wha")
    saved = open_disk(tmp_path).saved("state")
    assert saved is not None
    assert saved["step"] == 2


def test_other_workload_starts_with_an_empty_disk(tmp_path):
    open_disk(tmp_path).save("state", state(1))
    other = open_disk(tmp_path, origin=99.0)
    assert other.saved("state") is None
    other.save("state", state(7))
    assert open_disk(tmp_path).saved("state") is None
    assert len(list(tmp_path.iterdir())) == 1


def test_usage_above_the_quota_is_detected_for_any_writer(tmp_path):
    disk = open_disk(tmp_path, disk_limit=1 << 20)
    disk.save("state", state(1))
    disk.check()
    folder = tmp_path / "own" / "deep"
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(bytes(2 << 20))
    # The size of a broken link cannot be read.
    (tmp_path / "own" / "gone").symlink_to("nowhere")
    with pytest.raises(
        HostError, match=r"of source contains 2.*KiB, above its quota of 1MiB"
    ):
        disk.check()
