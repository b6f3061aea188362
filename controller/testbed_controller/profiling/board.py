"""Measurement of a board: training speed by kind and size of layer, memory, and the link to a peer.

This module is also a program that needs only Python and torch, so that it runs on a board without the testbed:
`testbed setup profile --program | ssh board python3 -`. It prints a device profile, a file that a scenario may name.

The time of a layer is modelled as FLOPs divided by a speed, plus bytes of activations divided by a memory rate.
`fit_rates` finds the two rates that fit all measured layers best.
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
"""TCP port of the peer in the measurement of a link."""
BATCH_SIZE = 32
"""Number of samples in a measured batch."""
REPETITIONS = 15
"""Number of measurements of a layer, of which the fastest counts, since noise only adds time."""
PINGS = 20
"""Number of measured round trips, of which the shortest counts."""
TRANSFER_BYTES = 4 << 20
"""Number of bytes sent to measure the rate of a link."""
_BYTES_PER_VALUE = 4
"""Size of a value in float32."""
_LEAST_SECONDS = 1e-9
"""Minimum time of a layer in seconds: after the overhead is subtracted, noise could give a negative time."""


class LayerMeasurement(NamedTuple):
    """The work and the time of a layer in training: forward and backward pass of a batch.

    The backward pass counts twice the FLOPs and once the bytes of the forward pass.
    """

    kind: str
    """Such as ``convolution``."""
    name: str
    """Sizes of the layer, such as ``3-32 32x32``: input channels, output channels, and the image."""
    flops: float
    accessed: float
    """Bytes of activations read and written."""
    weights: float
    """Bytes of weights, read twice, and of their gradients, written once."""
    seconds: float
    """Processor time."""


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
    """Return the minimum time of the forward pass plus the minimum of the backward pass, in processor seconds.

    ``inputs`` have the shape (samples, ...) of the module's input.
    """
    forward_times = []
    backward_times = []
    for _ in range(REPETITIONS):
        # A new leaf each time, so that the backward pass computes the gradient of the inputs too, as inside a network.
        leaf = inputs.detach().requires_grad_()
        start = time.thread_time()
        outputs = module(leaf)
        forward_times.append(time.thread_time() - start)
        gradient = torch.ones_like(outputs)
        start = time.thread_time()
        outputs.backward(gradient)
        backward_times.append(time.thread_time() - start)
    return min(forward_times) + min(backward_times)


def fit_rates(
    work: Sequence[tuple[float, ...]], *, relative: bool = False
) -> tuple[float | None, ...]:
    """Return the rates that best predict layer times, one for each kind of work.

    A row of ``work`` is a layer: its amounts of each kind of work, such as FLOPs and bytes, and its time in seconds.
    The predicted time is the sum of the amounts divided by their rates, fitted by least squares of the absolute or
    ``relative`` errors. Work with a rate of None takes no time: all subsets of the kinds are tried, since a fit of all
    kinds could have negative rates.

    >>> [round(rate) for rate in fit_rates([(2e9, 1e9, 3.0), (4e9, 1e9, 5.0)])]
    [1000000000, 1000000000]
    """
    table = torch.tensor(work, dtype=torch.float64)
    if relative:
        table = table / table[:, -1:]
    # Shapes: (layers, kinds of work), (layers,), and (kinds of work,).
    amounts = table[:, :-1]
    measured_times = table[:, -1]
    # FLOPs and bytes differ by orders of magnitude: scaled columns keep the least squares well conditioned.
    scale = amounts.amax(0)
    # Columns of work that any layer has.
    columns_with_work = []
    for column, largest in enumerate(scale.tolist()):
        if largest > 0:
            columns_with_work.append(column)
    # An additional rate must reduce the error by more than rounding.
    rounding = 1e-12 * float((measured_times**2).sum())
    best_error = math.inf
    best_rates: tuple[float | None, ...] = (None,) * len(scale)
    for columns in _subsets(columns_with_work):
        scaled = amounts[:, columns] / scale[columns]
        # The solution is the time of the largest amount in each column.
        times = torch.linalg.lstsq(scaled, measured_times, driver="gelsd").solution
        error = float(((scaled @ times - measured_times) ** 2).sum())
        if bool((times > 0).all()) and error < best_error - rounding:
            rates = (scale[columns] / times).tolist()
            rate_of_column = dict(zip(columns, rates, strict=True))
            best_error = error
            best_rates = tuple(map(rate_of_column.get, range(len(scale))))
    return best_rates


def _subsets(columns: Sequence[int]) -> Iterator[list[int]]:
    """Yield all non-empty subsets, the smaller ones first."""
    for size in range(1, len(columns) + 1):
        for subset in itertools.combinations(columns, size):
            yield list(subset)


def sample_layers() -> Iterator[tuple[str, str, nn.Module, tuple[int, ...], float]]:
    """Yield layers of small networks: kind, name, module, input shape, and forward FLOPs of one sample."""
    for inputs, outputs, side, kernel, groups in _CONVOLUTIONS:
        # This padding keeps the size of the image.
        convolution = nn.Conv2d(
            inputs, outputs, kernel, padding=kernel // 2, groups=groups
        )
        # A multiply and an add are two FLOPs.
        flops = 2.0 * kernel**2 * inputs // groups * outputs * side * side
        kind = "convolution"
        if groups > 1:
            kind = "depthwise"
        elif kernel == 1:
            kind = "pointwise"
        name = f"{inputs}-{outputs} {side}x{side}"
        yield kind, name, convolution, (inputs, side, side), flops
    for inputs, outputs in _LINEAR_SIZES:
        linear = nn.Linear(inputs, outputs)
        flops = 2.0 * inputs * outputs
        yield "linear", f"{inputs}-{outputs}", linear, (inputs,), flops
    for kind, make_layer in _LAYERS_WITHOUT_FLOPS:
        for channels, side in _IMAGE_SIZES:
            name = f"{channels} {side}x{side}"
            yield kind, name, make_layer(channels), (channels, side, side), 0.0


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
"""Input channels, output channels, side of the image, side of the kernel, and groups of each convolution."""
_LINEAR_SIZES = ((784, 128), (1024, 128), (256, 256), (96, 96), (2048, 512))
"""Number of inputs and outputs of each linear layer."""
_IMAGE_SIZES = ((32, 32), (16, 28), (64, 16), (160, 6))
"""Channels and side of the images for layers without FLOPs."""
_LAYERS_WITHOUT_FLOPS: tuple[tuple[str, Callable[[int], nn.Module]], ...] = (
    ("normalisation", nn.BatchNorm2d),
    ("activation", lambda channels: nn.ReLU()),
    ("pooling", lambda channels: nn.MaxPool2d(2)),
)
"""Kind, and function of the number of channels, of layers whose time depends on memory alone."""


def update_seconds(values: int) -> float:
    """Return the processor time in seconds of one step of SGD with ``values`` weights."""
    weights = nn.Parameter(torch.zeros(values))
    weights.grad = torch.zeros(values)
    optimizer = torch.optim.SGD([weights], lr=0.1)
    durations = []
    for _ in range(REPETITIONS):
        start = time.thread_time()
        optimizer.step()
        durations.append(time.thread_time() - start)
    return min(durations)


def measure_layers() -> list[LayerMeasurement]:
    """Measure the training of each layer with one thread on random values, less the overhead of a call."""
    with one_thread():
        overhead = training_seconds(nn.Identity(), torch.randn(1))
        measurements = []
        for kind, name, module, shape, flops in sample_layers():
            inputs = torch.randn(BATCH_SIZE, *shape)
            values = inputs.numel() + module(inputs).numel()
            # Biases are vectors, whose size is negligible.
            weights = 0
            for parameter in module.parameters():
                if parameter.ndim > 1:
                    weights += parameter.numel()
            duration = training_seconds(module, inputs) - overhead
            # Forward and backward: FLOPs once and twice, activations once and once, weights read twice and their
            # gradients written once.
            measurement = LayerMeasurement(
                kind,
                name,
                flops=3 * flops * BATCH_SIZE,
                accessed=2.0 * _BYTES_PER_VALUE * values,
                weights=3.0 * _BYTES_PER_VALUE * weights,
                seconds=max(_LEAST_SECONDS, duration),
            )
            measurements.append(measurement)
        for values in (1 << 16, 1 << 20):
            measurements.append(
                LayerMeasurement(
                    "other",
                    f"SGD {values}",
                    # A multiply and an add for each value.
                    flops=2.0 * values,
                    accessed=0.0,
                    weights=0.0,
                    seconds=update_seconds(values),
                )
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
    """Serve one measurement of a link: echo each ping of a byte, then acknowledge `TRANSFER_BYTES` bytes."""
    with socket.create_server(("", port)) as server:
        connection, _ = server.accept()
        with connection:
            for _ in range(PINGS):
                connection.sendall(connection.recv(1))
            remaining = TRANSFER_BYTES
            while remaining:
                remaining -= len(connection.recv(min(remaining, 1 << 16)))
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
        connection.sendall(bytes(TRANSFER_BYTES))
        connection.recv(1)
        # Besides the transmission, the time includes a round trip until the acknowledgement.
        duration = time.perf_counter() - start - round_trip
        return 8 * TRANSFER_BYTES / duration, round_trip / 2


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
        f"# {json.dumps(about)[1:-1]}; processor time of one thread, forward and backward of {BATCH_SIZE} samples.",
        f"speed: {speed / 1e9:.4g}gflops",
    ]
    if memory_rate is not None:
        lines.append(f"memory_rate: {memory_rate / 1e9:.4g}GB/s")
    lines.append(f"memory: {available_memory() >> 20}MiB")
    lines.append("processors: 1")
    if peer is not None:
        rate, delay = measure_link(peer)
        link = f"{{rate: {rate / 1e6:.4g}mbit, delay: {delay * 1e3:.4g}ms}}"
        lines.append(f"# The link to {peer}, for the scenario's network: {link}")
    lines.append("# By kind of layer: measured time, and the time by these rates.")
    lines.append("kinds:")
    for kind, group in itertools.groupby(measurements, _kind_of):
        lines += _render_kind(kind, list(group))
    return "\n".join(lines) + "\n"


def _kind_of(layer: LayerMeasurement) -> str:
    return layer.kind


def _render_kind(kind: str, layers: Sequence[LayerMeasurement]) -> Iterator[str]:
    """Yield lines of YAML: the rates of one kind of layers, and comments with measured and predicted times."""
    rows = []
    for layer in layers:
        rows.append((layer.flops, layer.accessed, layer.weights, layer.seconds))
    # With relative errors, small layers count as much as large ones.
    rates = fit_rates(rows, relative=True)
    units = {"speed": "gflops", "memory_rate": "GB/s", "weight_rate": "GB/s"}
    keys = []
    for (key, unit), rate in zip(units.items(), rates, strict=True):
        if rate:
            keys.append(f"{key}: {rate / 1e9:.4g}{unit}")
    yield f"  {kind}: {{{', '.join(keys)}}}"
    for layer, row in zip(layers, rows, strict=True):
        predicted = 0.0
        # Without the last value of the row, the measured time.
        for amount, rate in zip(row[:-1], rates, strict=True):
            if rate:
                predicted += amount / rate
        yield f"    # {layer.name:16} {layer.seconds * 1e3:8.3f} ms {predicted * 1e3:8.3f} ms"


def main() -> None:
    """Print the profile of this machine, or serve another machine as its peer."""
    parser = argparse.ArgumentParser(prog="profile", description=main.__doc__)
    parser.add_argument(
        "--peer", help="also measure the link to this machine, which runs --serve"
    )
    parser.add_argument(
        "--serve", action="store_true", help="serve the measurement of one link"
    )
    arguments = parser.parse_args()
    if arguments.serve:
        serve_peer()
    else:
        sys.stdout.write(measure_profile(arguments.peer))


if __name__ == "__main__":
    main()
