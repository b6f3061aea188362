"""What a device keeps over its restarts."""

import pytest
import torch

from testbed.common.errors import HostError
from testbed.wire.message import Message
from testbed_agent.disk import Disk
from testbed_agent.settings import Settings


def disk(path, origin=12.5, **keys):
    return Disk(Settings("run", "source", "token", disk=str(path), **keys), origin)


def test_later_start_reads_data_of_an_earlier_start(tmp_path):
    disk(tmp_path).save(
        "state", Message("state", {"step": 3}, {"w": torch.arange(4.0)})
    )
    found = disk(tmp_path).saved("state")
    assert found is not None
    assert found["step"] == 3
    assert torch.equal(found.tensors["w"], torch.arange(4.0))


def test_partially_written_file_is_ignored(tmp_path):
    one = disk(tmp_path)
    one.save("state", Message("state", {"step": 1}))
    one.save("state", Message("state", {"step": 2}))
    (folder,) = tmp_path.iterdir()
    (folder / "state.part").write_bytes(b"half of wha")
    found = disk(tmp_path).saved("state")
    assert found is not None
    assert found["step"] == 2


def test_other_workload_starts_with_an_empty_disk(tmp_path):
    disk(tmp_path).save("state", Message("state", {"step": 1}))
    other = disk(tmp_path, origin=99.0)
    assert other.saved("state") is None
    other.save("state", Message("state", {"step": 7}))
    assert disk(tmp_path).saved("state") is None
    assert len(list(tmp_path.iterdir())) == 1


def test_usage_above_the_quota_is_detected_for_any_writer(tmp_path):
    held = disk(tmp_path, disk_limit=1 << 20)
    held.save("state", Message("state", {"step": 1}))
    held.check()
    (tmp_path / "own" / "deep").mkdir(parents=True)
    (tmp_path / "own" / "deep" / "file").write_bytes(bytes(2 << 20))
    (tmp_path / "own" / "gone").symlink_to("nowhere")
    with pytest.raises(
        HostError, match=r"of source holds 2.*KiB, above its quota of 1MiB"
    ):
        held.check()
