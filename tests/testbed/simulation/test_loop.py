"""The virtual clock under asyncio's own tools."""

import asyncio
from contextvars import Context, copy_context

import pytest

from testbed.simulation.event_queue import OWNER, EmptySchedule, TimeLimit
from testbed.simulation.loop import VirtualLoop


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
            tasks = [
                group.create_task(asyncio.sleep(delay, delay)) for delay in (3, 1, 2)
            ]
        return [task.result() for task in tasks], loop.time()

    assert loop.run_until_complete(main()) == ([3, 1, 2], 8)


def test_stillness_and_limit():
    for limit, delay, end in ((10, None, EmptySchedule), (10, 11, TimeLimit)):
        loop = VirtualLoop(limit)
        wait = asyncio.sleep(delay) if delay else loop.create_future()
        with pytest.raises(end):
            loop.run_until_complete(wait)
        loop.close()


def test_frozen_callbacks_run_in_order_after_thawing(loop):
    seen = []

    async def ticks(owner):
        OWNER.set(owner)
        for _ in range(3):
            await asyncio.sleep(1)
            seen.append((owner, loop.time()))

    async def main():
        tasks = [asyncio.ensure_future(ticks(owner)) for owner in "ab"]
        await asyncio.sleep(1.5)
        loop.event_queue.freeze("a")
        await asyncio.sleep(1)
        loop.event_queue.thaw("a")
        await asyncio.gather(*tasks)

    loop.run_until_complete(main())
    assert [time for owner, time in seen if owner == "a"] == [1, 2.5, 3.5]
    assert [time for owner, time in seen if owner == "b"] == [1, 2, 3]


def test_error_of_a_callback_goes_to_the_handler(loop):
    seen = []
    loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))

    def fail():
        raise error

    error = ValueError("a callback's")
    loop.call_soon(fail)
    assert loop.run_until_complete(asyncio.sleep(1, "done")) == "done"
    assert seen == [error]


def test_error_that_nobody_awaits_is_logged(loop, caplog):
    async def fail():
        raise ValueError("a task's")

    async def main():
        task = asyncio.create_task(fail())
        await asyncio.sleep(1)
        del task

    loop.run_until_complete(main())
    assert "never retrieved" in caplog.text
    assert "a task's" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_loop_can_run_again_after_an_error(loop, error):
    async def main():
        await asyncio.sleep(1)
        raise error

    with pytest.raises(error):
        loop.run_until_complete(main())
    assert not loop.is_running()
    assert loop.run_until_complete(asyncio.sleep(1, loop.time())) == 1


def test_every_callback_runs_in_its_own_context(loop):
    seen = []

    def look(number):
        seen.append((number, OWNER.get()))

    first, empty = copy_context(), Context()
    first.run(OWNER.set, "first")

    async def main():
        OWNER.set("main")
        loop.call_soon(look, 1, context=first)
        loop.call_later(1, look, 2, context=first)
        loop.call_soon(look, 3, context=empty)
        loop.call_soon(look, 4)
        await asyncio.sleep(2)

    loop.run_until_complete(main())
    assert sorted(seen) == [(1, "first"), (2, "first"), (3, None), (4, "main")]


def test_cancelled_callback_is_not_called(loop):
    seen = []

    async def main():
        timer = loop.call_later(1, seen.append, "late")
        soon = loop.call_soon(seen.append, "soon")
        assert (timer.when(), timer.cancelled(), soon.cancelled()) == (1, False, False)
        timer.cancel()
        soon.cancel()
        assert timer.cancelled()
        assert soon.cancelled()
        await asyncio.sleep(2)

    loop.run_until_complete(main())
    assert seen == []


def test_asynchronous_generators_are_closed(loop):
    closed = []

    async def numbers(name):
        try:
            while True:
                yield 1
        finally:
            await asyncio.sleep(1)
            closed.append((name, loop.time()))

    async def main():
        async for _ in numbers("dropped"):
            break
        kept = numbers("kept")
        await anext(kept)
        await asyncio.sleep(5)
        return kept

    kept = loop.run_until_complete(main())
    assert closed == [("dropped", 1)]
    loop.run_until_complete(loop.shutdown_asyncgens())
    assert closed == [("dropped", 1), ("kept", 6)]
    del kept


def test_forbidden_uses_of_the_event_loop_raise(loop):
    async def within():
        with pytest.raises(RuntimeError, match="another loop is running"):
            VirtualLoop().run_forever()
        with pytest.raises(RuntimeError, match="cannot be closed"):
            loop.close()
        with pytest.raises(NotImplementedError):
            await loop.run_in_executor(None, print)

    loop.run_until_complete(within())
    loop.call_soon(loop.stop)
    with pytest.raises(RuntimeError, match="before the future was done"):
        loop.run_until_complete(loop.create_future())
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.run_forever()


def test_factory_makes_tasks_with_name_and_context(loop):
    made = []

    def factory(loop, coroutine, **options):
        made.append(options)
        return asyncio.Task(coroutine, loop=loop, **options)

    async def owner():
        return OWNER.get()

    async def main():
        other = copy_context()
        other.run(OWNER.set, "other")
        task = asyncio.create_task(owner(), name="named", context=other)
        assert task.get_name() == "named"
        return await task

    assert loop.run_until_complete(main()) == "other"
    loop.set_task_factory(factory)
    assert loop.run_until_complete(main()) == "other"
    assert len(made) == 2
