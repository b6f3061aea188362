"""asyncio's timers, tasks and contexts on the virtual clock."""

import asyncio
from contextvars import Context, copy_context

import pytest

from testbed.simulation.event_queue import OWNER, EmptySchedule, TimeLimit
from testbed.simulation.loop import VirtualLoop


@pytest.fixture
def loop():
    virtual_loop = VirtualLoop()
    yield virtual_loop
    virtual_loop.close()


def test_sleep_advances_clock_exactly_without_waiting(loop):
    async def sleep_twice():
        await asyncio.sleep(1e-7)
        first = loop.time()
        # Eleven days, for which the test could not wait.
        await asyncio.sleep(1e6)
        return first, loop.time()

    assert loop.run_until_complete(sleep_twice()) == (1e-7, 1e6 + 1e-7)


def test_callbacks_at_same_instant_run_in_call_order(loop):
    calls = []
    for number in range(50):
        loop.call_at(1.0, calls.append, number)
    loop.run_until_complete(asyncio.sleep(2))
    assert calls == list(range(50))


def test_cancelled_timer_does_not_call(loop):
    calls = []
    loop.call_later(1, calls.append, "late").cancel()
    loop.run_until_complete(asyncio.sleep(2))
    assert calls == []


def test_timeouts_queues_and_task_groups_use_virtual_time(loop):
    async def use_asyncio_tools():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await asyncio.Event().wait()
        assert loop.time() == 3
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Queue().get(), 2)
        async with asyncio.TaskGroup() as group:
            tasks = []
            for delay in (3, 1, 2):
                tasks.append(group.create_task(asyncio.sleep(delay, delay)))
        return [task.result() for task in tasks]

    # The time-outs take 3 and 2 s, the group as long as its longest sleep of 3 s.
    assert loop.run_until_complete(use_asyncio_tools()) == [3, 1, 2]
    assert loop.time() == 8


def test_wait_without_scheduled_events_raises_empty_schedule():
    loop = VirtualLoop(10)
    with pytest.raises(EmptySchedule):
        loop.run_until_complete(loop.create_future())
    loop.close()


def test_wait_beyond_time_limit_raises():
    loop = VirtualLoop(10)
    with pytest.raises(TimeLimit):
        loop.run_until_complete(asyncio.sleep(11))
    loop.close()


def test_frozen_callbacks_run_in_order_after_thawing(loop):
    times = {"a": [], "b": []}

    async def record_three_times(owner):
        OWNER.set(owner)
        for _ in range(3):
            await asyncio.sleep(1)
            times[owner].append(loop.time())

    async def freeze_and_thaw_a():
        tasks = [asyncio.ensure_future(record_three_times(owner)) for owner in "ab"]
        await asyncio.sleep(1.5)
        loop.event_queue.freeze("a")
        await asyncio.sleep(1)
        loop.event_queue.thaw("a")
        await asyncio.gather(*tasks)

    loop.run_until_complete(freeze_and_thaw_a())
    # The callback of a at 2 s runs at 2.5 s, and the next one a second later.
    assert times == {"a": [1, 2.5, 3.5], "b": [1, 2, 3]}


def test_exception_of_callback_is_passed_to_handler(loop):
    exceptions = []
    loop.set_exception_handler(
        lambda _, context: exceptions.append(context["exception"])
    )

    def raise_error():
        raise error

    error = ValueError("a callback's")
    loop.call_soon(raise_error)
    assert loop.run_until_complete(asyncio.sleep(1, "done")) == "done"
    assert exceptions == [error]


def test_exception_of_unawaited_task_is_logged(loop, caplog):
    async def raise_error():
        raise ValueError("a task's")

    async def drop_failed_task():
        task = asyncio.create_task(raise_error())
        await asyncio.sleep(1)
        # asyncio logs the exception when the task is garbage.
        del task

    loop.run_until_complete(drop_failed_task())
    assert "never retrieved" in caplog.text
    assert "a task's" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_loop_runs_again_after_error(loop, error):
    async def raise_error():
        await asyncio.sleep(1)
        raise error

    with pytest.raises(error):
        loop.run_until_complete(raise_error())
    assert not loop.is_running()
    assert loop.run_until_complete(asyncio.sleep(1, loop.time())) == 1


def test_callback_runs_in_passed_or_current_context(loop):
    owners = {}

    def record_owner(number):
        owners[number] = OWNER.get()

    first, empty = copy_context(), Context()
    first.run(OWNER.set, "first")

    async def schedule_callbacks():
        OWNER.set("main")
        loop.call_soon(record_owner, 1, context=first)
        loop.call_later(1, record_owner, 2, context=first)
        loop.call_soon(record_owner, 3, context=empty)
        loop.call_soon(record_owner, 4)
        await asyncio.sleep(2)

    loop.run_until_complete(schedule_callbacks())
    assert owners == {1: "first", 2: "first", 3: None, 4: "main"}


def test_handles_report_cancellation_and_do_not_call(loop):
    calls = []

    async def cancel_handles():
        timer = loop.call_later(1, calls.append, "late")
        soon = loop.call_soon(calls.append, "soon")
        assert timer.when() == 1
        assert not timer.cancelled()
        assert not soon.cancelled()
        timer.cancel()
        soon.cancel()
        assert timer.cancelled()
        assert soon.cancelled()
        await asyncio.sleep(2)

    loop.run_until_complete(cancel_handles())
    assert calls == []


def test_asynchronous_generators_are_closed_when_dropped_or_shut_down(loop):
    closed = []

    async def yield_for_ever(name):
        try:
            while True:
                yield 1
        finally:
            await asyncio.sleep(1)
            closed.append((name, loop.time()))

    async def start_two_generators():
        async for _ in yield_for_ever("dropped"):
            break
        kept = yield_for_ever("kept")
        await anext(kept)
        await asyncio.sleep(5)
        return kept

    # The reference keeps the second generator alive until the shutdown.
    kept = loop.run_until_complete(start_two_generators())
    assert closed == [("dropped", 1)]
    loop.run_until_complete(loop.shutdown_asyncgens())
    assert closed == [("dropped", 1), ("kept", 6)]
    del kept


def test_forbidden_uses_of_event_loop_raise(loop):
    async def misuse_running_loop():
        with pytest.raises(RuntimeError, match="another loop is running"):
            VirtualLoop().run_forever()
        with pytest.raises(RuntimeError, match="cannot be closed"):
            loop.close()
        with pytest.raises(NotImplementedError):
            await loop.run_in_executor(None, print)

    loop.run_until_complete(misuse_running_loop())
    loop.call_soon(loop.stop)
    with pytest.raises(RuntimeError, match="before the future was done"):
        loop.run_until_complete(loop.create_future())
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.run_forever()


def test_task_factory_receives_name_and_context(loop):
    factory_options = []

    def create_task(loop, coroutine, **options):
        factory_options.append(options)
        return asyncio.Task(coroutine, loop=loop, **options)

    async def current_owner():
        return OWNER.get()

    async def create_named_task():
        other = copy_context()
        other.run(OWNER.set, "other")
        task = asyncio.create_task(current_owner(), name="named", context=other)
        assert task.get_name() == "named"
        return await task

    assert loop.run_until_complete(create_named_task()) == "other"
    loop.set_task_factory(create_task)
    assert loop.run_until_complete(create_named_task()) == "other"
    # One task for each of the two coroutines.
    assert len(factory_options) == 2
