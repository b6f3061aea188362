"""Memory of the host that the containers of a run need."""

import pytest

from testbed.common.errors import HostError
from testbed.hardware import DeviceSpec
from testbed_controller.lab.memory import check_memory, describe_small_memory

GB = 1 << 30
SMALL = 64 << 20
"""Less memory than an agent with torch needs."""


def make_devices(count: int, memory: float = 4 * GB) -> list[DeviceSpec]:
    return [DeviceSpec(f"d{number}", 1e9, memory) for number in range(count)]


def test_devices_beyond_memory_of_host_are_refused() -> None:
    # 300 agents of 172 MB; 23.5 GiB are 25.2 GB.
    message = r"300 devices take at least 51.6 GB .* has 25.2 GB.*--runtime simulate"
    with pytest.raises(HostError, match=message):
        check_memory(make_devices(300), 23.5 * GB, torch=True)


def test_devices_without_torch_or_with_low_limit_need_less_memory() -> None:
    check_memory(make_devices(128), 23.5 * GB, torch=True)
    check_memory(make_devices(300), 23.5 * GB, torch=False)
    # A container cannot use more than its limit.
    check_memory(make_devices(300, memory=SMALL), 23.5 * GB, torch=True)


def test_devices_too_small_for_their_agent_are_described() -> None:
    small = make_devices(1, memory=SMALL)
    text = describe_small_memory([*make_devices(1), *small], torch=True)
    assert text is not None
    assert "an agent with torch takes 172 MB" in text
    assert describe_small_memory(small, torch=False) is None
