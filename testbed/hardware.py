"""What a device is: its speed and memory, and the published figures behind the named profiles."""

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
"""Bytes of values that layers read and write, and of weights, for each byte of float32."""


@dataclass(frozen=True)
class Rates:
    """How fast a device works on layers of a kind; None: that takes no time."""

    speed: float | None
    """FLOP/s."""
    memory_rate: float | None = None
    """Bytes/s of the values that layers read and write."""
    weight_rate: float | None = None
    """Bytes/s of weights and of their gradients, which a batch of any size costs once."""

    def seconds(self, work: Work) -> float:
        """Return how long work takes one processor: FLOPs over speed, and bytes over their rates."""
        pairs = zip(work, (self.speed, self.memory_rate, self.weight_rate), strict=True)
        return sum(amount / rate for amount, rate in pairs if rate is not None)


@dataclass(frozen=True)
class DeviceSpec:
    """One emulated device."""

    name: str
    speed: float
    """FLOP/s that the pacing charges compute at (a multiply and an add are two), of each processor."""
    memory: float
    """Bytes; the container's limit and the planner's bound."""
    cpus: float | None = None
    """CFS quota for workloads that are not ours; None leaves pacing alone to set the speed."""
    profile: str = ""
    slowdown: float | None = None
    """Where given, work takes this multiple of the processor time that the host needs for it, whatever its FLOPs;
    ``speed`` is then what planning goes by."""
    uplink: float | None = None
    """bit/s on the wire that the device sends to all others together; None is no limit beside the links' own."""
    downlink: float | None = None
    """bit/s on the wire that it receives from all others together."""
    processors: int = 1
    """Pieces of work that it computes at once, each at ``speed``."""
    memory_rate: float | None = None
    """Bytes/s at which layers read what enters them and write what leaves, of each processor; None: in no time."""
    watts: tuple[float, float] | None = None
    """Drawn while idle, and while it computes; None: not known, and no energy is reckoned."""
    kinds: Mapping[Kind, Rates] = field(default_factory=dict)
    """Rates of layers by their kind, where they are known; ``speed`` and ``memory_rate`` are those of all others."""
    precision: Precision = "f32"
    """What layers compute in; rates are those of float32."""
    faster: float = 1.0
    """How many times as fast FLOPs are in that precision."""
    gpu: bool = False
    """Whether its container is given the host's GPUs."""

    def with_share(self, share: float) -> DeviceSpec:
        """Return the device with a share of its speed and of its rates, from 0 to 1."""

        def less(rate: float | None) -> float | None:
            return None if rate is None else rate * share

        kinds = {
            kind: Rates(less(each.speed), less(each.memory_rate), less(each.weight_rate))
            for kind, each in self.kinds.items()
        }
        return replace(self, speed=self.speed * share, memory_rate=less(self.memory_rate), kinds=kinds)

    def joules(self, up: float, computing: float) -> float | None:
        """Return the energy of ``up`` seconds, ``computing`` of them busy: idle * up + (busy - idle) * computing."""
        if self.watts is None:
            return None
        idle, busy = self.watts
        return idle * up + (busy - idle) * computing

    def seconds(self, cost: Cost) -> float:
        """Return how long work takes one processor, by the rates of each kind of layer.

        Plans, estimates, pacing and the simulator all take it from here. Normalisation, activation and pooling have no
        FLOPs; a convolution has all that is charged.
        """
        return sum(rates.seconds(cost.of(kinds)) for kinds, rates in self.rates)

    @cached_property
    def rates(self) -> tuple[tuple[tuple[Kind, ...], Rates], ...]:
        """Kinds that have rates together, with these; each kind once. Devices with equal ones take the same time."""
        if self.precision != "f32":
            plain = replace(self, precision="f32").rates
            layers = tuple(
                (tuple(kind for kind in kinds if kind != "other"), self._narrow(each)) for kinds, each in plain
            )
            return *(pair for pair in layers if pair[0]), *(
                (("other",), each) for kinds, each in plain if "other" in kinds
            )
        others = tuple(kind for kind in KINDS if kind not in self.kinds)
        return (others, Rates(self.speed, self.memory_rate)), *(((kind,), each) for kind, each in self.kinds.items())

    def _narrow(self, rates: Rates) -> Rates:
        """Return rates of layers in its precision; what no layer does, such as updates, stays in float32."""
        values, weights = SHARES[self.precision]
        speed, memory, weight = rates.speed, rates.memory_rate, rates.weight_rate
        return Rates(
            None if speed is None else speed * self.faster,
            None if memory is None else memory / values,
            None if weight is None else weight / weights,
        )


_COPIES = 2
"""A sender holds a message and its encoded form, a receiver the arrived bytes and their copy in its model."""

_ALWAYS_HELD = 1 << 20
"""Bytes of a message that every device takes: methods measure links with a quarter of it."""


def largest_message(*ends: DeviceSpec) -> int:
    """Return the bytes of the largest message that all these devices can send and receive, by their memory."""
    return max(_ALWAYS_HELD, int(min(device.memory for device in ends) / _COPIES))


def check_message(size: int, sender: DeviceSpec, receiver: DeviceSpec) -> None:
    """Raise `TestbedError` for a message that its sender or receiver cannot hold."""
    if size > (largest := largest_message(sender, receiver)):
        raise TestbedError(
            f"a message of {formats.size(size)} from {sender.name} to {receiver.name} is too large: by their memory "
            f"these devices hold messages of at most {formats.size(largest)}: give both more, or send it in parts"
        )


@dataclass(frozen=True)
class Machine:
    """A computer whose processes or containers the devices are: what they compute at once shares its cores."""

    devices: tuple[str, ...]
    cores: float
    """Pieces of work that it computes at once at their devices' full speed; more than that are slowed alike."""


@dataclass(frozen=True)
class Profile:
    """A kind of device, with where its figures come from."""

    name: str
    speed: float
    """FLOP/s."""
    memory: float
    """Bytes."""
    basis: str
    """What kind of figure ``speed`` is: measured and read in the source, reported (remembered from it and not read
    again), a peak, or an assumption."""
    source: str
    """Where the figures come from."""
    processors: int = 1
    """Processors that compute at once, each at ``speed``."""
    memory_rate: float | None = None
    """Bytes/s that layers read and write, of each processor; None: not known, and no time is charged for it."""
    kinds: Mapping[Kind, Rates] = field(default_factory=dict)
    """Rates of layers by their kind, where they are known."""
    watts: tuple[float, float] | None = None
    """Drawn while idle, and while it computes; None: not known."""
    precisions: Mapping[Precision, float] = field(default_factory=dict)
    """FLOP/s in other precisions than float32, where they are known."""

    def device(self, name: str, precision: Precision = "f32") -> DeviceSpec:
        """Return a device of this kind, with no figures of its own."""
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
            faster=self.precisions.get(precision, self.speed) / self.speed,
        )


_GIB = 2.0**30
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
