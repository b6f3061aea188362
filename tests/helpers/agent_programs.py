"""Starts an agent that knows the programs the tests of agents run: `python agent_programs.py`.

They use every call of `testbed.device`; a test names one in its deployment's scenario as the method's ``program``.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testbed import methods
from testbed.device import Cost, Device, Span
from testbed.ml.lazy import torch
from testbed.ml.method import Method, Options, PlanningProblem, ProgramContext
from testbed.plan import Plan
from testbed.wire.message import Message


class Instructions(Options):
    """What the two devices do."""

    program: str = "log_name"
    count: int = 1
    size: int = 0


class Scripted(Method):
    """Runs what its options say."""

    name = "scripted"
    summary = "for tests"
    needs_torch = False
    Options = Instructions

    def plan(self, problem: PlanningProblem) -> Plan:
        return Plan(method=self.name, coordinator="a", assignments=())

    async def program(self, device: Device, context: ProgramContext) -> None:
        options = context.problem.options
        assert isinstance(options, Instructions)
        await PROGRAMS[options.program](device, context, options)


async def log_name(
    device: Device, context: ProgramContext, options: Instructions
) -> None:
    device.record("log", text=device.name)


async def ping(device: Device, context: ProgramContext, options: Instructions) -> None:
    """Bounce tensors of ``size`` bytes between a and b."""
    if device.name == "a":
        for number in range(options.count):
            tensors = (
                {"x": torch.full((options.size // 4,), float(number))}
                if options.size
                else {}
            )
            start = device.now()
            await device.send("b", Message("ping", {"number": number}, tensors))
            sent = device.now()
            answer = await device.receive()
            device.record(
                "log",
                sent=sent - start,
                bounced=device.now() - start,
                number=answer["number"],
            )
            assert answer.sender == "b"
            if tensors:
                assert torch.equal(answer.tensors["x"], tensors["x"] + 1)
    else:
        for _ in range(options.count):
            message = await device.receive()
            tensors = {name: tensor.add_(1) for name, tensor in message.tensors.items()}
            await device.send("a", Message("pong", message.fields, tensors))


async def stream(
    device: Device, context: ProgramContext, options: Instructions
) -> None:
    """Send many without waiting in between; b checks that they come in order, each once."""
    if device.name == "a":
        pending = [
            asyncio.create_task(
                device.send(
                    "b", Message("item", {"number": number}, padding=options.size)
                )
            )
            for number in range(options.count)
        ]
        await asyncio.gather(*pending)
        device.record("log", text="sent")
    else:
        for number in range(options.count):
            message = await device.receive()
            assert message["number"] == number, (message["number"], number)
        device.record("log", text="received in order")


async def slow_reader(
    device: Device, context: ProgramContext, options: Instructions
) -> None:
    """Like `stream`, but b lets its inbox fill up first."""
    if device.name == "b":
        await device.sleep(1)
    await stream(device, context, options)


async def withdraw(
    device: Device, context: ProgramContext, options: Instructions
) -> None:
    """Give a message up whose receiver is not there yet, and wait for the one behind it."""
    if device.name == "a":
        first = asyncio.create_task(
            asyncio.wait_for(device.send("b", Message("withdrawn")), 0.3)
        )
        second = asyncio.create_task(device.send("b", Message("kept")))
        try:
            await first
        except TimeoutError:
            device.record("log", text="given up")
        await second
    else:
        device.record("log", text=(await device.receive()).kind)


async def persist(
    device: Device, context: ProgramContext, options: Instructions
) -> None:
    """Keep sending numbers to b whatever happens to it; b reports the ones it gets."""
    if device.name == "a":
        for number in range(options.count):
            await device.send("b", Message("number", {"number": number}))
            await device.sleep(0.05)
    else:
        while True:
            message = await device.receive()
            device.record("log", number=message["number"])
            if message["number"] == options.count - 1:
                return


async def cast(device: Device, context: ProgramContext, options: Instructions) -> None:
    """A tells b but not c."""
    if device.name == "a":
        await device.sleep(0.3)
        for number in range(options.count):
            tensors = {"x": torch.arange(options.size // 4, dtype=torch.float32)}
            await device.cast(["b"], Message("cast", {"number": number}, tensors))
            await device.sleep(0.02)
        await device.send("c", Message("end"))
    elif device.name == "b":
        for number in range(options.count):
            message = await device.receive()
            assert message["number"] == number
            assert message.tensors["x"].tolist() == list(range(options.size // 4))
        device.record("log", text="heard all")
    else:
        message = await device.receive()
        device.record("log", text=message.kind)


async def fill_disk(
    device: Device, context: ProgramContext, options: Instructions
) -> None:
    """Fill the disk with ``size`` bytes, and wait."""
    Path(os.environ["TESTBED_DISK"], "hoard").write_bytes(bytes(options.size))
    await device.sleep(60)


async def compute(
    device: Device, context: ProgramContext, options: Instructions
) -> None:
    """Work of known cost: quick, too slow, failing, queued."""
    speed = context.problem.device(device.name).speed

    async def work(seconds: float, charged: float, name: str) -> Any:
        return await device.compute(
            lambda: time.sleep(seconds) or name,
            Cost(charged * speed),
            Span(name, batch=3),
        )

    assert await work(0, 0.005, "quick") == "quick"
    assert await work(0.03, 0.01, "late") == "late"
    queued = [asyncio.create_task(work(0, 0.01, "queued")) for _ in range(20)]
    await asyncio.gather(*queued)
    try:
        await device.compute(lambda: 1 // 0, Cost(speed), Span("failing"))
    except ZeroDivisionError:
        device.record("log", text="caught")


async def compute_last(
    device: Device, context: ProgramContext, options: Instructions
) -> None:
    """Its last event is that of a result."""
    cost = Cost(0.02 * context.problem.device(device.name).speed)
    await device.compute(lambda: None, cost, Span("last"))
    device.record("log", text="computed")


async def fail(device: Device, context: ProgramContext, options: Instructions) -> None:
    raise RuntimeError("this program is broken")


async def exit_process(
    device: Device, context: ProgramContext, options: Instructions
) -> None:
    """Would end the process, as a script does."""
    sys.exit("enough")


async def log_forever(
    device: Device, context: ProgramContext, options: Instructions
) -> None:
    number = 0
    while True:
        device.record("log", number=number, at=time.monotonic())
        await device.sleep(0.02)
        number += 1


async def expose(
    device: Device, context: ProgramContext, options: Instructions
) -> None:
    """Shows what it was given to begin with, changed by one piece of work."""
    weights = dict(context.weights or {})
    device.expose(lambda: weights)
    device.expose(lambda: {"w": weights["w"]} if weights["w"].any() else {}, part=True)
    if context.dataset is not None:
        train, tests = (
            len(context.dataset.train_labels),
            len(context.dataset.test_labels),
        )
        owned = dict(context.problem.samples)
        device.record(
            "log", data=context.dataset.name, samples=train, tests=tests, owned=owned
        )
    await device.compute(
        lambda: weights.update(w=torch.ones(2, 3)), Cost(), Span("work")
    )
    await device.receive()


PROGRAMS: Mapping[str, Any] = {
    program.__name__: program
    for program in (
        log_name, ping, stream, slow_reader, withdraw, persist, cast, compute, compute_last, fill_disk, fail,
        exit_process, log_forever, expose,
    )
}  # fmt: skip


if __name__ == "__main__":
    from testbed_agent.__main__ import main

    methods._CLASSES["scripted"] = "agent_programs:Scripted"
    sys.modules["agent_programs"] = sys.modules["__main__"]
    main()
