import pytest

from testbed.common.errors import HostError
from testbed.hardware import DeviceSpec
from testbed_controller.lab.memory import check_memory, describe_small_memory

GB = 1 << 30


def devices(count: int, memory: float = 4 * GB) -> list[DeviceSpec]:
    return [DeviceSpec(f"d{number}", 1e9, memory) for number in range(count)]


def test_more_devices_than_the_memory_holds_are_refused_with_the_figures() -> None:
    with pytest.raises(
        HostError,
        match=r"300 devices take at least 51.6 GB .* has 25.2 GB.*--runtime simulate",
    ):
        check_memory(devices(300), 23.5 * GB, torch=True)


def test_devices_that_fit_pass_and_those_without_torch_or_with_a_small_limit_take_less() -> (
    None
):
    check_memory(devices(128), 23.5 * GB, torch=True)
    check_memory(devices(300), 23.5 * GB, torch=False)
    check_memory(devices(300, memory=64 << 20), 23.5 * GB, torch=True)


def test_devices_that_cannot_hold_their_agent_are_named() -> None:
    text = describe_small_memory(
        [*devices(1), *devices(1, memory=64 << 20)], torch=True
    )
    assert text is not None
    assert "an agent with torch takes 172 MB" in text
    assert describe_small_memory(devices(1, memory=64 << 20), torch=False) is None
