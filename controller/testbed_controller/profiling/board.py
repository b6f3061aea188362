"""Measurement of a board: training speed by kind and size of layer, memory, and the link to a peer.

Needs only Python and torch, nothing of the testbed (`testbed setup profile --program | ssh board python3 -`).
Prints a profile that a scenario names by its file.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

PORT = 8720
BATCH = 32
REPETITIONS = 15
PINGS = 20
SENT = 4 << 20
"""Bytes by which a link is measured."""
_BYTES = 4
"""Bytes of a value."""
_LEAST = 1e-9
"""Minimum measurable time of a layer in seconds."""


class Measured(NamedTuple):
    """A layer in training: forward and backward of a batch, the backward with two forwards' FLOPs and one's bytes."""

    kind: str
    name: str
    flops: float
    accessed: float
    """Bytes of activations read and written."""
    weights: float
    """Bytes of weights, read twice, and of their gradients."""
    seconds: float
    """Seconds of the processor."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Restrict torch to one thread within the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def seconds(module: nn.Module, inputs: torch.Tensor) -> float:
    """Return the processor time of forward and backward in seconds: the minimum of several runs, since noise only adds.

    ``inputs`` are (samples, ...), of the shape that the module takes.
    """
    forwards, backwards = [], []
    for _ in range(REPETITIONS):
        entering = inputs.detach().requires_grad_()
        begun = time.thread_time()
        outputs = module(entering)
        forwards.append(time.thread_time() - begun)
        gradient = torch.ones_like(outputs)
        begun = time.thread_time()
        outputs.backward(gradient)
        backwards.append(time.thread_time() - begun)
    return min(forwards) + min(backwards)


def fitted(
    work: Sequence[tuple[float, ...]], relative: bool = False
) -> tuple[float | None, ...]:
    """Return the rates that best predict layer times; each row has amounts of work, then seconds.

    The time of a layer is the sum of its amounts divided by their rates, fitted by least squares of the absolute or
    ``relative`` errors. A rate of None takes no time. All subsets of amounts are tried, so that no rate is negative.
    """
    table = torch.tensor(work, dtype=torch.float64)
    table = table / table[:, -1:] if relative else table
    amounts, wanted = table[:, :-1], table[:, -1]
    scale = amounts.amax(0)
    used = [place for place, largest in enumerate(scale.tolist()) if largest > 0]
    rounding = 1e-12 * float((wanted**2).sum())  # a rate more must say more than that
    best: tuple[float, tuple[float | None, ...]] = (math.inf, (None,) * len(scale))
    for count in range(1, len(used) + 1):
        for columns in map(list, itertools.combinations(used, count)):
            scaled = amounts[:, columns] / scale[columns]
            times = torch.linalg.lstsq(scaled, wanted, driver="gelsd").solution
            error = float(((scaled @ times - wanted) ** 2).sum())
            if bool((times > 0).all()) and error < best[0] - rounding:
                solution = dict(
                    zip(columns, (scale[columns] / times).tolist(), strict=True)
                )
                best = (
                    error,
                    tuple(solution.get(place) for place in range(len(scale))),
                )
    return best[1]


def layers() -> Iterator[tuple[str, str, nn.Module, tuple[int, ...], float]]:
    """Yield layers of small networks: kind, name, module, input shape, and forward FLOPs of one sample."""
    for entering, leaving, side, kernel, groups in _CONVOLUTIONS:
        convolution = nn.Conv2d(
            entering, leaving, kernel, padding=kernel // 2, groups=groups
        )
        flops = 2.0 * kernel**2 * entering // groups * leaving * side * side
        kind = (
            "depthwise" if groups > 1 else "pointwise" if kernel == 1 else "convolution"
        )
        yield (
            kind,
            f"{entering}-{leaving} {side}x{side}",
            convolution,
            (entering, side, side),
            flops,
        )
    for entering, leaving in (
        (784, 128),
        (1024, 128),
        (256, 256),
        (96, 96),
        (2048, 512),
    ):
        yield (
            "linear",
            f"{entering}-{leaving}",
            nn.Linear(entering, leaving),
            (entering,),
            2.0 * entering * leaving,
        )
    for kind, make in _WITHOUT_FLOPS:
        for channels, side in ((32, 32), (16, 28), (64, 16), (160, 6)):
            yield (
                kind,
                f"{channels} {side}x{side}",
                make(channels),
                (channels, side, side),
                0.0,
            )


_CONVOLUTIONS = (
    *(
        (3, 32, 32, 3, 1),
        (16, 16, 28, 3, 1),
        (32, 64, 16, 3, 1),
        (32, 32, 14, 3, 1),
        (64, 64, 8, 3, 1),
    ),
    *((96, 96, 8, 3, 1), (192, 192, 4, 3, 1), (384, 384, 2, 3, 1), (384, 384, 4, 3, 1)),
    *((24, 96, 24, 1, 1), (96, 24, 24, 1, 1), (48, 160, 12, 1, 1), (320, 80, 6, 1, 1)),
    *((72, 72, 20, 3, 72), (160, 160, 10, 3, 160), (448, 448, 5, 3, 448)),
)
"""Input and output channels, image side, kernel side, and groups."""
_WITHOUT_FLOPS: tuple[tuple[str, Callable[[int], nn.Module]], ...] = (
    ("normalisation", nn.BatchNorm2d),
    ("activation", lambda channels: nn.ReLU()),
    ("pooling", lambda channels: nn.MaxPool2d(2)),
)


def update_seconds(values: int) -> float:
    """Return the processor time of a step of SGD: two FLOPs for each value."""
    weights = nn.Parameter(torch.zeros(values))
    weights.grad = torch.zeros(values)
    optimizer, taken = torch.optim.SGD([weights], lr=0.1), []
    for _ in range(REPETITIONS):
        begun = time.thread_time()
        optimizer.step()
        taken.append(time.thread_time() - begun)
    return min(taken)


def measure() -> list[Measured]:
    """Measure the training of each layer on random values with one thread, without the overhead of an empty call."""
    with one_thread():
        idle = seconds(nn.Identity(), torch.randn(1))
        measurements = []
        for kind, name, module, shape, flops in layers():
            inputs = torch.randn(BATCH, *shape)
            values = inputs.numel() + module(inputs).numel()
            matrices = sum(
                each.numel() for each in module.parameters() if each.ndim > 1
            )
            amounts = (
                3 * flops * BATCH,
                2.0 * _BYTES * values,
                3.0 * _BYTES * matrices,
            )
            measurements.append(
                Measured(
                    kind, name, *amounts, max(_LEAST, seconds(module, inputs) - idle)
                )
            )
        for values in (1 << 16, 1 << 20):
            measurements.append(
                Measured(
                    "other",
                    f"SGD {values}",
                    2.0 * values,
                    0.0,
                    0.0,
                    update_seconds(values),
                )
            )
    return measurements


def memory() -> int:
    """Return the available memory in bytes: the container's limit, if any."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ):
        try:
            sizes.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return min(sizes)


def serve(port: int = PORT) -> None:
    """Be the peer of one measurement: answer each byte of the first, then say when all of the rest has come."""
    with socket.create_server(("", port)) as server:
        connection, _ = server.accept()
        with connection:
            for _ in range(PINGS):
                connection.sendall(connection.recv(1))
            left = SENT
            while left:
                left -= len(connection.recv(min(left, 1 << 16)))
            connection.sendall(b".")


def link(peer: str, port: int = PORT) -> tuple[float, float]:
    """Return rate (bit/s of payload) and one-way delay (half the shortest round trip, in seconds) to a serving peer."""
    with socket.create_connection((peer, port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answers = []
        for _ in range(PINGS):
            begun = time.perf_counter()
            connection.sendall(b".")
            connection.recv(1)
            answers.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        connection.sendall(bytes(SENT))
        connection.recv(1)
        return 8 * SENT / (time.perf_counter() - begun - min(answers)), min(answers) / 2


def profile(peer: str | None = None) -> str:
    """Return the profile of this machine as YAML. Raises ValueError for a machine busy with other work."""
    measurements = measure()
    speed, memory_rate = fitted(
        [(each.flops, each.accessed, each.seconds) for each in measurements]
    )
    if speed is None:
        raise ValueError(
            "layer times do not grow with the work: stop other programs and try again"
        )
    about = f"{platform.node()}, {platform.machine()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    lines = [
        f"# {json.dumps(about)[1:-1]}; processor time of one thread, forward and backward of {BATCH} samples.",
        f"speed: {speed / 1e9:.4g}gflops",
        *([] if memory_rate is None else [f"memory_rate: {memory_rate / 1e9:.4g}GB/s"]),
        f"memory: {memory() >> 20}MiB",
        "processors: 1",
    ]
    if peer is not None:
        rate, delay = link(peer)
        written = f"{{rate: {rate / 1e6:.4g}mbit, delay: {delay * 1e3:.4g}ms}}"
        lines.append(f"# The link to {peer}, for the scenario's network: {written}")
    lines.append(
        "# By kind of layer, with what was measured, and what these rates make of it."
    )
    lines.append("kinds:")
    for kind, alike in itertools.groupby(measurements, lambda each: each.kind):
        lines += _of_kind(kind, list(alike))
    return "\n".join(lines) + "\n"


def _of_kind(kind: str, measured: Sequence[Measured]) -> Iterator[str]:
    rates = fitted([each[2:] for each in measured], relative=True)
    units = (
        ("speed", 1e9, "gflops"),
        ("memory_rate", 1e9, "GB/s"),
        ("weight_rate", 1e9, "GB/s"),
    )
    keys = (
        f"{key}: {rate / size:.4g}{unit}"
        for (key, size, unit), rate in zip(units, rates, strict=True)
        if rate
    )
    yield f"  {kind}: {{{', '.join(keys)}}}"
    for each in measured:
        charged = sum(
            amount / rate for amount, rate in zip(each[2:5], rates, strict=True) if rate
        )
        yield f"    # {each.name:16} {each.seconds * 1e3:8.3f} ms {charged * 1e3:8.3f} ms"


def main() -> None:
    """Print the profile of this machine, or serve another machine as its peer."""
    parser = argparse.ArgumentParser(prog="profile", description=main.__doc__)
    parser.add_argument(
        "--peer", help="measure the link to this machine too, where --serve runs"
    )
    parser.add_argument(
        "--serve", action="store_true", help="be the peer of one measurement"
    )
    given = parser.parse_args()
    if given.serve:
        serve()
    else:
        sys.stdout.write(profile(given.peer))


if __name__ == "__main__":
    main()
