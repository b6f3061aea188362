"""Device programs for tests of the agent; ``python agent_programs.py`` starts an agent that can run them.

Together the programs use every call of `testbed.device`. The option ``program`` of the method selects one.
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
    """The selected program and its parameters."""

    program: str = "log_name"
    count: int = 1
    """Number of messages."""
    size: int = 0
    """Bytes of a message, or of a file."""


class Scripted(Method):
    """Runs the program selected by the options."""

    name = "scripted"
    summary = "run a test program"
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
    """Exchange ``count`` messages with tensors of ``size`` bytes; b returns each tensor plus 1."""
    if device.name == "a":
        for number in range(options.count):
            tensors = {}
            if options.size:
                elements = options.size // 4  # float32 has 4 bytes
                tensors["x"] = torch.full((elements,), float(number))
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
            # The sender is the authenticated peer, not a field of the message.
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
    """Send ``count`` messages at once; b checks their number and order."""
    if device.name == "a":
        sends = []
        for number in range(options.count):
            message = Message("item", {"number": number}, padding=options.size)
            sends.append(asyncio.create_task(device.send("b", message)))
        await asyncio.gather(*sends)
        device.record("log", text="sent")
    else:
        for number in range(options.count):
            message = await device.receive()
            assert message["number"] == number, (message["number"], number)
        device.record("log", text="received in order")


async def slow_reader(
    device: Device, context: ProgramContext, options: Instructions
) -> None:
    """Run `stream` after b's inbox has had a second to fill up."""
    # A full inbox must delay the sender.
    if device.name == "b":
        await device.sleep(1)
    await stream(device, context, options)


async def withdraw(
    device: Device, context: ProgramContext, options: Instructions
) -> None:
    """Cancel a message while the receiver is down, and send the next one."""
    if device.name == "a":
        # The cancelled message must not block the one queued behind it.
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
    """Send numbers to b through failures of b, which logs each received number."""
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
    """Cast from a to b; c receives only the final message."""
    if device.name == "a":
        # Casts are not repeated, so b and c have to listen first.
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
        device.record("log", text="received all casts")
    else:
        message = await device.receive()
        device.record("log", text=message.kind)


async def fill_disk(
    device: Device, context: ProgramContext, options: Instructions
) -> None:
    """Write ``size`` bytes to the disk, and wait to be stopped."""
    Path(os.environ["TESTBED_DISK"], "hoard").write_bytes(bytes(options.size))
    await device.sleep(60)


async def compute(
    device: Device, context: ProgramContext, options: Instructions
) -> None:
    """Run computations of known cost: one in time, one late, several queued, one failing."""
    speed = context.problem.device(device.name).speed

    async def work(name: str, *, seconds: float, charged: float) -> Any:
        return await device.compute(
            lambda: time.sleep(seconds) or name,
            Cost(charged * speed),
            Span(name, batch=3),
        )

    assert await work("quick", seconds=0, charged=0.005) == "quick"
    assert await work("late", seconds=0.03, charged=0.01) == "late"
    queued = [work("queued", seconds=0, charged=0.01) for _ in range(20)]
    await asyncio.gather(*queued)
    try:
        await device.compute(lambda: 1 // 0, Cost(speed), Span("failing"))
    except ZeroDivisionError:
        device.record("log", text="caught")


async def compute_last(
    device: Device, context: ProgramContext, options: Instructions
) -> None:
    """Compute once and log a last event."""
    cost = Cost(0.02 * context.problem.device(device.name).speed)
    await device.compute(lambda: None, cost, Span("last"))
    device.record("log", text="computed")


async def fail(device: Device, context: ProgramContext, options: Instructions) -> None:
    raise RuntimeError("this program is broken")


async def exit_process(
    device: Device, context: ProgramContext, options: Instructions
) -> None:
    """Call sys.exit, as a user's script may do; the agent must survive."""
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
    """Expose the initial weights, and replace them by ones in a computation."""
    weights = dict(context.weights or {})

    def nonzero_weights() -> dict[str, Any]:
        return {"w": weights["w"]} if weights["w"].any() else {}

    device.expose(lambda: weights)
    device.expose(nonzero_weights, part=True)
    dataset = context.dataset
    if dataset is not None:
        device.record(
            "log",
            data=dataset.name,
            samples=len(dataset.train_labels),
            tests=len(dataset.test_labels),
            owned=dict(context.problem.samples),
        )
    await device.compute(
        lambda: weights.update(w=torch.ones(2, 3)), Cost(), Span("work")
    )
    # Weights can be read while the program runs: wait to be stopped.
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

    # This module runs as __main__; under its own name it would be imported a second time.
    methods._CLASSES["scripted"] = "agent_programs:Scripted"
    sys.modules["agent_programs"] = sys.modules["__main__"]
    main()
