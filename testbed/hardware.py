"""Device hardware: speeds, memory, and named profiles with the source of each value.

A speed is in FLOP/s, where a multiply and an add are two operations. A memory rate is in bytes per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from testbed.common import formats
from testbed.common.errors import TestbedError
from testbed.device import KINDS, Cost, Kind, Precision, Work

SHARES: Mapping[Precision, tuple[float, float]] = {
    "f32": (1, 1),
    "f16": (0.5, 0.5),
    "bf16": (0.5, 0.5),
    "int8": (1, 0.25),
}
"""Bytes of activations and of weights per byte of float32, by precision."""


@dataclass(frozen=True)
class Rates:
    """Processing rates for one kind of layer. A rate of None takes no time."""

    speed: float | None
    """FLOP/s."""
    memory_rate: float | None = None
    """Bytes/s of activations read and written."""
    weight_rate: float | None = None
    """Bytes/s of weights and of their gradients, which a batch of any size costs once."""

    def seconds(self, work: Work) -> float:
        """Return how long work takes one processor: FLOPs over speed, and bytes over their rates.

        >>> Rates(speed=2e9, memory_rate=4e9).seconds(Work(flops=1e9, accessed=8e6, weights=0.0))
        0.502
        """
        rates = (self.speed, self.memory_rate, self.weight_rate)
        seconds = 0.0
        for amount, rate in zip(work, rates, strict=True):
            if rate is not None:
                seconds += amount / rate
        return seconds


@dataclass(frozen=True)
class DeviceSpec:
    """One emulated device."""

    name: str
    speed: float
    """FLOP/s of each processor, used for pacing."""
    memory: float
    """Bytes; the container's limit and the planner's bound."""
    cpus: float | None = None
    """CFS quota for external programs; None limits the speed by pacing only."""
    profile: str = ""
    slowdown: float | None = None
    """If set, work takes this multiple of the measured processor time regardless of FLOPs; planners still use
    ``speed``."""
    uplink: float | None = None
    """Rate limit in bit/s on the wire for everything sent; None is unlimited."""
    downlink: float | None = None
    """Rate limit in bit/s on the wire for everything received; None is unlimited."""
    processors: int = 1
    """Number of concurrent computations, each at ``speed``."""
    memory_rate: float | None = None
    """Bytes/s of activations read and written by each processor; None takes no time."""
    watts: tuple[float, float] | None = None
    """Power while idle and while computing; None if unknown, in which case energy is not reported."""
    kinds: Mapping[Kind, Rates] = field(default_factory=dict)
    """Rates by kind of layer; ``speed`` and ``memory_rate`` apply to all others."""
    precision: Precision = "f32"
    """Number format of computations; rates refer to float32."""
    faster: float = 1.0
    """Factor on the FLOP/s of the precision, relative to float32."""
    gpu: bool = False
    """Whether the container has access to the host's GPUs."""

    def with_share(self, share: float) -> DeviceSpec:
        """Return the device with all speeds and rates multiplied by a share between 0 and 1."""

        def scale(rate: float | None) -> float | None:
            return None if rate is None else rate * share

        kinds: dict[Kind, Rates] = {}
        for kind, rates in self.kinds.items():
            kinds[kind] = Rates(
                scale(rates.speed), scale(rates.memory_rate), scale(rates.weight_rate)
            )
        return replace(
            self,
            speed=self.speed * share,
            memory_rate=scale(self.memory_rate),
            kinds=kinds,
        )

    def joules(self, up: float, computing: float) -> float | None:
        """Return the energy in joules of ``up`` seconds with ``computing`` busy seconds; None if unknown.

        >>> DeviceSpec("a", 1e9, 1e9, watts=(2.0, 5.0)).joules(up=10.0, computing=4.0)
        32.0
        """
        if self.watts is None:
            return None
        idle, busy = self.watts
        return idle * up + (busy - idle) * computing

    def seconds(self, cost: Cost) -> float:
        """Return how long work takes one processor, by the rates of each kind of layer.

        Planners, estimates, pacing and the simulator all use this function. Normalisation, activation and pooling have
        no FLOPs, only bytes.

        >>> DeviceSpec("a", speed=2e9, memory=1e9).seconds(Cost(flops=1e9))
        0.5
        """
        return sum(rates.seconds(cost.of(kinds)) for kinds, rates in self.rates)

    @cached_property
    def rates(self) -> tuple[tuple[tuple[Kind, ...], Rates], ...]:
        """Return the distinct rates with the kinds of layers using each. Devices with equal rates take
        equal time."""
        unnamed = tuple(kind for kind in KINDS if kind not in self.kinds)
        plain: list[tuple[tuple[Kind, ...], Rates]] = [
            (unnamed, Rates(self.speed, self.memory_rate))
        ]
        for kind, rates in self.kinds.items():
            plain.append(((kind,), rates))
        if self.precision == "f32":
            return tuple(plain)
        scaled = []
        unscaled: list[tuple[tuple[Kind, ...], Rates]] = []
        for kinds, rates in plain:
            layers = tuple(kind for kind in kinds if kind != "other")
            if layers:
                scaled.append((layers, self._scale_to_precision(rates)))
            if "other" in kinds:
                unscaled.append((("other",), rates))
        # Last, since sums of seconds depend on their order in the last digit.
        return (*scaled, *unscaled)

    def _scale_to_precision(self, rates: Rates) -> Rates:
        """Scale layer rates to the precision. Work outside layers, such as updates, stays in float32."""
        values, weights = SHARES[self.precision]
        speed, memory, weight = rates.speed, rates.memory_rate, rates.weight_rate
        return Rates(
            None if speed is None else speed * self.faster,
            None if memory is None else memory / values,
            None if weight is None else weight / weights,
        )


_COPIES = 2
"""Number of copies of a message in memory: at the sender, the message and its encoded form; at the receiver, the bytes
and their copy in the model."""

_ALWAYS_ACCEPTED = 1 << 20
"""Size in bytes of a message accepted by every device; methods measure links with a quarter of this size."""


def largest_message(*devices: DeviceSpec) -> int:
    """Return the size in bytes of the largest message fitting the memory of all given devices.

    >>> largest_message(DeviceSpec("a", 1e9, memory=8e9), DeviceSpec("b", 1e9, memory=1e9))
    500000000
    """
    memory = min(device.memory for device in devices)
    return max(_ALWAYS_ACCEPTED, int(memory / _COPIES))


def check_message(size: int, sender: DeviceSpec, receiver: DeviceSpec) -> None:
    """Raise `TestbedError` if a message exceeds the memory of the sender or the receiver."""
    largest = largest_message(sender, receiver)
    if size > largest:
        raise TestbedError(
            f"a message of {formats.size(size)} from {sender.name} to {receiver.name} is too large for the memory of "
            f"these devices, sufficient for {formats.size(largest)}: increase `memory` of both, or split the message"
        )


@dataclass(frozen=True)
class Machine:
    """A computer with several devices, whose computations share the cores."""

    devices: tuple[str, ...]
    cores: float
    """Number of concurrent computations at full speed; beyond this number, all slow down equally."""


@dataclass(frozen=True)
class Profile:
    """A type of device, with the source of the values."""

    name: str
    speed: float
    """FLOP/s."""
    memory: float
    """Bytes."""
    basis: str
    """Origin of ``speed``: measured (read in the source), reported (quoted from memory), a peak, or an assumption."""
    source: str
    """Origin of the values."""
    processors: int = 1
    """Number of concurrent computations, each at ``speed``."""
    memory_rate: float | None = None
    """Bytes/s of activations for each processor; None if unknown, in which case memory access takes no time."""
    kinds: Mapping[Kind, Rates] = field(default_factory=dict)
    """Rates by kind of layer, where known."""
    watts: tuple[float, float] | None = None
    """Power while idle and while computing; None if unknown."""
    precisions: Mapping[Precision, float] = field(default_factory=dict)
    """FLOP/s by precision other than float32, where known."""

    def device(self, name: str, precision: Precision = "f32") -> DeviceSpec:
        """Return a device with the values of the profile."""
        return DeviceSpec(
            name,
            self.speed,
            self.memory,
            profile=self.name,
            processors=self.processors,
            memory_rate=self.memory_rate,
            kinds=self.kinds,
            watts=self.watts,
            precision=precision,
            # A ratio, which stays true for a device that shares a machine.
            faster=self.precisions.get(precision, self.speed) / self.speed,
        )


_GIB = 2.0**30
"""Bytes."""
_TOP500_BENCHMARK = "github.com/geerlingguy/top500-benchmark"
_LLAMAFILE = "LLaMA Now Goes Faster on CPUs (J. Tunney, 2024), llamafile 0.7, TinyLlama 1.1B in q8_0, one digit each"

# HPL solves a dense system in float64 on all cores: a board's sustained best in large matrix products. float32 kernels
# can exceed it, small layers stay far below it, so a study of one network should measure it and override `speed`.
_PROFILES = (
    Profile(
        "raspberry-pi-2b",
        1.47e9,
        1 * _GIB,
        "reported, HPL float64",
        "Cloutier, Paradis, Weaver: A Raspberry Pi Cluster Instrumented for Fine-Grained Power Measurement, "
        "Electronics 5(4):61, 2016. EdgePipe's Table II implies 0.06 GFLOP/s for its 784-128 dense layer in training.",
    ),
    Profile(
        "raspberry-pi-3b",
        3.7e9,
        1 * _GIB,
        "reported, HPL float64",
        "Cloutier, Paradis, Weaver: A Raspberry Pi Cluster Instrumented for Fine-Grained Power Measurement, "
        "Electronics 5(4):61, 2016",
    ),
    Profile(
        "raspberry-pi-4b",
        11.889e9,
        4 * _GIB,
        "measured, HPL float64, 1.8 GHz",
        f"{_TOP500_BENCHMARK} (Raspberry Pi 4, BCM2711); sold with 1, 2, 4 and 8 GiB",
    ),
    Profile(
        "raspberry-pi-5",
        30.249e9,
        8 * _GIB,
        "measured, HPL float64, 2.4 GHz",
        f"{_TOP500_BENCHMARK} (Raspberry Pi 5, BCM2712); sold with 2, 4, 8 and 16 GiB",
    ),
    Profile(
        "raspberry-pi-4b-llm",
        22e9,
        8 * _GIB,
        "derived from tokens a second, 8-bit weights",
        f"{_LLAMAFILE}: 10 and 3 tokens a second (prompt, decoding); 2.2 GFLOP and 1.17 GB a token. STREAM copies "
        "5.5 GB/s (sci-pi.org.uk/bench/stream.html)",
        kinds={"linear": Rates(22e9, weight_rate=5.0e9)},
    ),
    Profile(
        "raspberry-pi-5-llm",
        99e9,
        8 * _GIB,
        "derived from tokens a second, 8-bit weights",
        f"{_LLAMAFILE}: 45 and 9 tokens a second (prompt, decoding); 2.2 GFLOP and 1.17 GB a token",
        kinds={"linear": Rates(99e9, weight_rate=13.2e9)},
    ),
    Profile(
        "jetson-nano",
        235.8e9,
        4 * _GIB,
        "peak of the GPU, float32: never reached",
        "128 CUDA cores x 2 FLOP x 921.6 MHz, from NVIDIA's data sheet (472 GFLOP/s in float16)",
        precisions={"f16": 472e9},
    ),
    Profile(
        "laptop",
        37.2753e9,
        8 * _GIB,
        "measured, HPL float64, two cores of 2011",
        "github.com/kreier/benchmark (HP EliteBook 8460p, Core i5-2520M); memory is an assumption",
    ),
    Profile(
        "laptop-m2",
        104.68e9,
        8 * _GIB,
        "measured, HPL float64, in Docker",
        f"{_TOP500_BENCHMARK} (M2 MacBook Air at 3.5 GHz); sold with 8, 16 and 24 GiB",
    ),
    Profile(
        "edge-server",
        229e9,
        32 * _GIB,
        "measured, HPL float64, six desktop cores",
        f"{_TOP500_BENCHMARK} (Ryzen 5 5600X at 3.7 GHz); memory is an assumption",
    ),
    Profile(
        "i7-11850h",
        38.2e9,
        32 * _GIB,
        "as edge-server",
        "PipeLearn (Zhang et al.), test platform: 8 cores, 32 GB; the paper gives no speed",
        processors=8,
    ),
    Profile(
        "epyc-thread",
        131e9,
        8 * _GIB,
        "measured, float32 training",
        "`testbed show models vgg5 --data synthetic-3x32x32 --measure 100`, torch 2.13, one thread of a virtual "
        "AMD EPYC; memory is an assumption",
        memory_rate=3.18e9,
    ),
    Profile(
        "cloud-server",
        953.47e9,
        96 * _GIB,
        "measured, HPL float64, 128 cores",
        f"{_TOP500_BENCHMARK} (Ampere Altra Max M128-30 at 3.0 GHz); memory is an assumption",
    ),
)

PROFILES = {profile.name: profile for profile in _PROFILES}
