"""The virtual clock under asyncio's own tools."""

import asyncio

import pytest

from testbed.simulation.loop import OWNER, Stillness, TimeLimit, VirtualLoop


@pytest.fixture
def loop():
    made = VirtualLoop()
    yield made
    made.close()


def test_waiting_costs_nothing_and_is_exact(loop):
    async def main():
        await asyncio.sleep(1e-7)
        first = loop.time()
        await asyncio.sleep(1e6)
        return first, loop.time()

    assert loop.run_until_complete(main()) == (1e-7, 1e6 + 1e-7)


def test_equal_instants_keep_the_order_of_the_calls(loop):
    seen = []
    for number in range(50):
        loop.call_at(1.0, seen.append, number)
    loop.run_until_complete(asyncio.sleep(2))
    assert seen == list(range(50))


def test_cancelled_timer_does_nothing(loop):
    seen = []
    loop.call_later(1, seen.append, "late").cancel()
    loop.run_until_complete(asyncio.sleep(2))
    assert seen == []


def test_timeouts_queues_and_groups(loop):
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await asyncio.Event().wait()
        assert loop.time() == 3
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Queue().get(), 2)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(asyncio.sleep(delay, delay)) for delay in (3, 1, 2)]
        return [task.result() for task in tasks], loop.time()

    assert loop.run_until_complete(main()) == ([3, 1, 2], 8)


def test_stillness_and_limit():
    for limit, delay, end in ((10, None, Stillness), (10, 11, TimeLimit)):
        loop = VirtualLoop(limit)
        wait = asyncio.sleep(delay) if delay else loop.create_future()
        with pytest.raises(end):
            loop.run_until_complete(wait)
        loop.close()


def test_frozen_code_stands_still_and_catches_up_in_order(loop):
    seen = []

    async def ticks(owner):
        OWNER.set(owner)
        for _ in range(3):
            await asyncio.sleep(1)
            seen.append((owner, loop.time()))

    async def main():
        tasks = [asyncio.ensure_future(ticks(owner)) for owner in "ab"]
        await asyncio.sleep(1.5)
        loop.freeze("a")
        await asyncio.sleep(1)
        loop.thaw("a")
        await asyncio.gather(*tasks)

    loop.run_until_complete(main())
    assert [time for owner, time in seen if owner == "a"] == [1, 2.5, 3.5]
    assert [time for owner, time in seen if owner == "b"] == [1, 2, 3]
