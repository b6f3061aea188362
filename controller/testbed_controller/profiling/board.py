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
"""TCP port on the board that answers the measurements."""
BATCH = 32
"""Samples of a measured batch."""
REPETITIONS = 15
"""Number of measurements of a layer, of which the fastest counts, since noise only adds time."""
PINGS = 20
"""Number of round trips, of which the shortest counts."""
SENT = 4 << 20
"""Bytes by which a link is measured."""
_BYTES = 4
"""Bytes of a value."""
_LEAST = 1e-9
"""Minimum measurable time of a layer in seconds."""


class Measured(NamedTuple):
    """A layer in training: forward and backward of a batch.

    The backward pass counts twice the FLOPs and once the bytes of the forward pass.
    """

    kind: str
    name: str
    flops: float
    accessed: float
    """Bytes of activations read and written."""
    weights: float
    """Bytes of weights, read twice, and of their gradients."""
    seconds: float
    """Processor time in seconds."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Restrict torch to one thread within the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def training_seconds(module: nn.Module, inputs: torch.Tensor) -> float:
    """Return the processor time of forward and backward in seconds: the minimum of several runs, since noise only adds.

    ``inputs`` have the shape (samples, ...) of the module's input.
    """
    forwards = []
    backwards = []
    for _ in range(REPETITIONS):
        # A new leaf each time, so that the backward pass computes the gradient of the inputs too, as inside a network.
        leaf = inputs.detach().requires_grad_()
        start = time.thread_time()
        outputs = module(leaf)
        forwards.append(time.thread_time() - start)
        gradient = torch.ones_like(outputs)
        start = time.thread_time()
        outputs.backward(gradient)
        backwards.append(time.thread_time() - start)
    return min(forwards) + min(backwards)


def fit_rates(
    work: Sequence[tuple[float, ...]], *, relative: bool = False
) -> tuple[float | None, ...]:
    """Return the rates that best predict layer times; each row has amounts of work, then seconds.

    The time of a layer is the sum of its amounts divided by their rates, fitted by least squares of the absolute or
    ``relative`` errors. A rate of None takes no time. All subsets of amounts are tried, so that no rate is negative.

    >>> [round(rate) for rate in fit_rates([(2e9, 1e9, 3.0), (4e9, 1e9, 5.0)])]
    [1000000000, 1000000000]
    """
    table = torch.tensor(work, dtype=torch.float64)
    if relative:
        table = table / table[:, -1:]
    amounts = table[:, :-1]
    wanted = table[:, -1]
    # FLOPs and bytes differ by orders of magnitude: scaled columns keep the least squares well conditioned.
    scale = amounts.amax(0)
    used = [place for place, largest in enumerate(scale.tolist()) if largest > 0]
    # An additional rate must reduce the error by more than rounding.
    rounding = 1e-12 * float((wanted**2).sum())
    best_error = math.inf
    best: tuple[float | None, ...] = (None,) * len(scale)
    for columns in _subsets(used):
        scaled = amounts[:, columns] / scale[columns]
        times = torch.linalg.lstsq(scaled, wanted, driver="gelsd").solution
        error = float(((scaled @ times - wanted) ** 2).sum())
        if bool((times > 0).all()) and error < best_error - rounding:
            rates = (scale[columns] / times).tolist()
            by_place = dict(zip(columns, rates, strict=True))
            best_error = error
            best = tuple(by_place.get(place) for place in range(len(scale)))
    return best


def _subsets(places: Sequence[int]) -> Iterator[list[int]]:
    for count in range(1, len(places) + 1):
        for subset in itertools.combinations(places, count):
            yield list(subset)


def sample_layers() -> Iterator[tuple[str, str, nn.Module, tuple[int, ...], float]]:
    """Yield layers of small networks: kind, name, module, input shape, and forward FLOPs of one sample."""
    for entering, leaving, side, kernel, groups in _CONVOLUTIONS:
        convolution = nn.Conv2d(
            entering, leaving, kernel, padding=kernel // 2, groups=groups
        )
        flops = 2.0 * kernel**2 * entering // groups * leaving * side * side
        kind = "convolution"
        if groups > 1:
            kind = "depthwise"
        elif kernel == 1:
            kind = "pointwise"
        name = f"{entering}-{leaving} {side}x{side}"
        yield kind, name, convolution, (entering, side, side), flops
    for entering, leaving in _LINEAR:
        linear = nn.Linear(entering, leaving)
        flops = 2.0 * entering * leaving
        yield "linear", f"{entering}-{leaving}", linear, (entering,), flops
    for kind, make in _WITHOUT_FLOPS:
        for channels, side in _MAPS:
            name = f"{channels} {side}x{side}"
            yield kind, name, make(channels), (channels, side, side), 0.0


_CONVOLUTIONS = (
    # Images of few channels, as in the first layers.
    (3, 32, 32, 3, 1),
    (16, 16, 28, 3, 1),
    (32, 64, 16, 3, 1),
    (32, 32, 14, 3, 1),
    (64, 64, 8, 3, 1),
    # Many channels on small images, as in the last layers.
    (96, 96, 8, 3, 1),
    (192, 192, 4, 3, 1),
    (384, 384, 2, 3, 1),
    (384, 384, 4, 3, 1),
    # Pointwise.
    (24, 96, 24, 1, 1),
    (96, 24, 24, 1, 1),
    (48, 160, 12, 1, 1),
    (320, 80, 6, 1, 1),
    # Depthwise.
    (72, 72, 20, 3, 72),
    (160, 160, 10, 3, 160),
    (448, 448, 5, 3, 448),
)
"""Input and output channels, image side, kernel side, and groups."""
_LINEAR = ((784, 128), (1024, 128), (256, 256), (96, 96), (2048, 512))
"""Inputs and outputs."""
_MAPS = ((32, 32), (16, 28), (64, 16), (160, 6))
"""Channels and image side."""
_WITHOUT_FLOPS: tuple[tuple[str, Callable[[int], nn.Module]], ...] = (
    ("normalisation", nn.BatchNorm2d),
    ("activation", lambda channels: nn.ReLU()),
    ("pooling", lambda channels: nn.MaxPool2d(2)),
)


def update_seconds(values: int) -> float:
    """Return the processor time of a step of SGD: two FLOPs for each value."""
    weights = nn.Parameter(torch.zeros(values))
    weights.grad = torch.zeros(values)
    optimizer = torch.optim.SGD([weights], lr=0.1)
    durations = []
    for _ in range(REPETITIONS):
        start = time.thread_time()
        optimizer.step()
        durations.append(time.thread_time() - start)
    return min(durations)


def measure_layers() -> list[Measured]:
    """Measure the training of each layer on random values with one thread, without the overhead of an empty call."""
    with one_thread():
        overhead = training_seconds(nn.Identity(), torch.randn(1))
        measurements = []
        for kind, name, module, shape, flops in sample_layers():
            inputs = torch.randn(BATCH, *shape)
            values = inputs.numel() + module(inputs).numel()
            matrices = 0
            for parameter in module.parameters():
                if parameter.ndim > 1:
                    matrices += parameter.numel()
            duration = max(_LEAST, training_seconds(module, inputs) - overhead)
            # Forward and backward: FLOPs once and twice, activations once and once, weights read twice and their
            # gradients written once.
            measurement = Measured(
                kind,
                name,
                flops=3 * flops * BATCH,
                accessed=2.0 * _BYTES * values,
                weights=3.0 * _BYTES * matrices,
                seconds=duration,
            )
            measurements.append(measurement)
        for values in (1 << 16, 1 << 20):
            duration = update_seconds(values)
            name = f"SGD {values}"
            measurements.append(
                Measured("other", name, 2.0 * values, 0.0, 0.0, duration)
            )
    return measurements


def available_memory() -> int:
    """Return the available memory in bytes: the container's limit, if any."""
    # A limit of cgroups version 1 may exceed the memory of the machine, since "unlimited" is a large number there.
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ):
        # The first file is that of cgroups version 2, which writes "max" without a limit, the second that of version 1.
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(Path(path).read_text()))
    return min(sizes)


def serve_peer(port: int = PORT) -> None:
    """Serve one measurement of a link: echo each ping of a byte, then acknowledge the arrival of `SENT` bytes."""
    with socket.create_server(("", port)) as server:
        connection, _ = server.accept()
        with connection:
            for _ in range(PINGS):
                connection.sendall(connection.recv(1))
            left = SENT
            while left:
                left -= len(connection.recv(min(left, 1 << 16)))
            connection.sendall(b".")


def measure_link(peer: str, port: int = PORT) -> tuple[float, float]:
    """Return rate (bit/s of payload) and one-way delay (half the shortest round trip, in seconds) to a serving peer."""
    with socket.create_connection((peer, port), timeout=60) as connection:
        # Nagle's algorithm would hold back a byte while another one is unacknowledged.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        round_trips = []
        for _ in range(PINGS):
            start = time.perf_counter()
            connection.sendall(b".")
            connection.recv(1)
            round_trips.append(time.perf_counter() - start)
        round_trip = min(round_trips)
        start = time.perf_counter()
        connection.sendall(bytes(SENT))
        connection.recv(1)
        # The acknowledgement took a round trip beyond the transmission.
        duration = time.perf_counter() - start - round_trip
        return 8 * SENT / duration, round_trip / 2


def measure_profile(peer: str | None = None) -> str:
    """Return the profile of this machine as YAML. Raises ValueError for a machine busy with other work."""
    measurements = measure_layers()
    rows = [(layer.flops, layer.accessed, layer.seconds) for layer in measurements]
    speed, memory_rate = fit_rates(rows)
    if speed is None:
        raise ValueError(
            "layer times do not grow with the work: stop other programs and try again"
        )
    about = f"{platform.node()}, {platform.machine()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    lines = [
        f"# {json.dumps(about)[1:-1]}; processor time of one thread, forward and backward of {BATCH} samples.",
        f"speed: {speed / 1e9:.4g}gflops",
    ]
    if memory_rate is not None:
        lines.append(f"memory_rate: {memory_rate / 1e9:.4g}GB/s")
    lines.append(f"memory: {available_memory() >> 20}MiB")
    lines.append("processors: 1")
    if peer is not None:
        rate, delay = measure_link(peer)
        written = f"{{rate: {rate / 1e6:.4g}mbit, delay: {delay * 1e3:.4g}ms}}"
        lines.append(f"# The link to {peer}, for the scenario's network: {written}")
    lines.append("# By kind of layer: measured time, and the time by these rates.")
    lines.append("kinds:")
    for kind, group in itertools.groupby(measurements, _kind_of):
        lines += _render_kind(kind, list(group))
    return "\n".join(lines) + "\n"


def _kind_of(layer: Measured) -> str:
    return layer.kind


def _render_kind(kind: str, layers: Sequence[Measured]) -> Iterator[str]:
    # Relative errors: small layers count as much as large ones.
    rates = fit_rates([layer[2:] for layer in layers], relative=True)
    units = {"speed": "gflops", "memory_rate": "GB/s", "weight_rate": "GB/s"}
    keys = []
    for (key, unit), rate in zip(units.items(), rates, strict=True):
        if rate:
            keys.append(f"{key}: {rate / 1e9:.4g}{unit}")
    yield f"  {kind}: {{{', '.join(keys)}}}"
    for layer in layers:
        charged = 0.0
        for amount, rate in zip(layer[2:5], rates, strict=True):
            if rate:
                charged += amount / rate
        yield f"    # {layer.name:16} {layer.seconds * 1e3:8.3f} ms {charged * 1e3:8.3f} ms"


def main() -> None:
    """Print the profile of this machine, or serve another machine as its peer."""
    parser = argparse.ArgumentParser(prog="profile", description=main.__doc__)
    parser.add_argument(
        "--peer", help="also measure the link to this machine, which runs --serve"
    )
    parser.add_argument(
        "--serve", action="store_true", help="serve the measurement of one link"
    )
    given = parser.parse_args()
    if given.serve:
        serve_peer()
    else:
        sys.stdout.write(measure_profile(given.peer))


if __name__ == "__main__":
    main()
