"""Measures a board: how fast it trains layers of each kind and size, its memory, and the link to a peer.

Stands by itself: needs Python and torch, nothing of the testbed (`testbed profile --program | ssh board python3 -`).
Prints a profile that a scenario names by its file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

PORT = 8720
BATCH = 32
REPETITIONS = 15
PINGS = 20
SENT = 4 << 20
"""Bytes by which a link is measured."""
_BYTES = 4
"""Of a value."""

Measured = tuple[str, float, float, float]
"""What it was; FLOPs and bytes of forward and backward of a batch, the backward with two forwards' FLOPs and one's
bytes; seconds of processor time."""


def seconds(module: nn.Module, inputs: torch.Tensor) -> float:
    """Return the processor time of forward and backward: the least of several, as all else only adds to it."""
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


def rates(work: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return speed (FLOP/s) and memory rate (bytes/s) by least squares over (FLOPs, bytes, seconds) of layers.

    Raises ValueError where no positive ones fit: the layers are too alike, or too small to be told from their overhead.
    """
    table = torch.tensor(work, dtype=torch.float64)
    per_flop, per_byte = torch.linalg.lstsq(table[:, :2], table[:, 2]).solution.tolist()
    if min(per_flop, per_byte) <= 0:
        raise ValueError("no speed and memory rate fit these layers: take a larger batch, or another model")
    return 1 / per_flop, 1 / per_byte


def layers() -> Iterator[tuple[str, nn.Module, tuple[int, ...], float]]:
    """Yield layers of small networks: name, module, shape of what enters, FLOPs of a forward of one sample."""
    for entering, leaving, side in ((3, 32, 32), (16, 16, 28), (32, 64, 16), (32, 32, 14), (64, 64, 8)):
        convolution = nn.Conv2d(entering, leaving, 3, padding=1)
        flops = 2.0 * 9 * entering * leaving * side * side
        yield f"conv2d {entering}-{leaving} {side}x{side}", convolution, (entering, side, side), flops
    for entering, leaving in ((784, 128), (1024, 128), (256, 256)):
        yield f"linear {entering}-{leaving}", nn.Linear(entering, leaving), (entering,), 2.0 * entering * leaving
    for channels, side in ((32, 32), (16, 28), (64, 16)):
        shape = (channels, side, side)
        for name, module in (
            ("batchnorm2d", nn.BatchNorm2d(channels)),
            ("relu", nn.ReLU()),
            ("maxpool2d", nn.MaxPool2d(2)),
        ):
            yield f"{name} {channels} {side}x{side}", module, shape, 0.0


def measure() -> list[Measured]:
    """Train each layer by itself on random values, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = []
    for name, module, shape, flops in layers():
        inputs = torch.randn(BATCH, *shape)
        values = inputs.numel() + module(inputs).numel()
        found.append((name, 3 * flops * BATCH, 2.0 * _BYTES * values, seconds(module, inputs)))
    torch.set_num_threads(threads)
    return found


def memory() -> int:
    """Return the bytes of memory that there are here, the container's limit where there is one."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
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
    """Return rate (bit/s of payload) and delay (seconds one way) to a peer that serves: half the fastest answer."""
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
    """Return the profile of this machine as a YAML text."""
    found = measure()
    speed, memory_rate = rates([each[1:] for each in found])
    about = f"{platform.node()}, {platform.machine()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    lines = [
        f"# {json.dumps(about)[1:-1]}; processor time of one thread, forward and backward of {BATCH} samples.",
        f"speed: {speed / 1e9:.4g}gflops",
        f"memory_rate: {memory_rate / 1e6:.4g}MB/s",
        f"memory: {memory() >> 20}MiB",
        "processors: 1",
    ]
    if peer is not None:
        rate, delay = link(peer)
        written = f"{{rate: {rate / 1e6:.4g}mbit, delay: {delay * 1e3:.4g}ms}}"
        lines.append(f"# The link to {peer}, for the scenario's network: {written}")
    lines.append("# Measured, and as the two rates have it:")
    for name, flops, size, taken in found:
        charged = flops / speed + size / memory_rate
        lines.append(f"#   {name:24} {taken * 1e3:8.3f} ms {charged * 1e3:8.3f} ms")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the profile of this machine, or be the peer of another."""
    parser = argparse.ArgumentParser(prog="profile", description=main.__doc__)
    parser.add_argument("--peer", help="measure the link to this machine too, where --serve runs")
    parser.add_argument("--serve", action="store_true", help="be the peer of one measurement")
    given = parser.parse_args()
    if given.serve:
        serve()
    else:
        sys.stdout.write(profile(given.peer))


if __name__ == "__main__":
    main()
