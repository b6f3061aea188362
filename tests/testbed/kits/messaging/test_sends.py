"""Tasks beside a program end with it, and fail it."""

import asyncio

import pytest

from testbed.kits.messaging.sends import Tasks


def test_failure_ends_the_program_with_what_went_wrong():
    ended = []

    async def patient():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("patient")

    async def failing():
        await asyncio.sleep(0)
        raise KeyError("lost")

    async def program():
        async with Tasks() as tasks:
            tasks.start(patient())
            tasks.start(failing())
            await asyncio.sleep(60)

    with pytest.raises(KeyError, match="lost"):
        asyncio.run(program())
    assert ended == ["patient"]


def test_what_the_program_raises_is_raised():
    async def program():
        async with Tasks() as tasks:
            tasks.start(asyncio.sleep(60))
            raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        asyncio.run(program())


def test_tasks_end_with_the_program():
    async def program():
        async with Tasks() as tasks:
            left = tasks.start(asyncio.sleep(60))
        assert left.cancelled()

    asyncio.run(program())
