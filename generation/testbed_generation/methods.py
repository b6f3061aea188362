"""Methods of the workload ``generate``: ranges of layers in a row, and shards of every layer.

Planning needs no torch, so this module imports the programs of devices only when they run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from testbed.common.errors import InputError, nearest
from testbed.common.quantities import ByteRate, Duration
from testbed.device import Device
from testbed.hardware import DeviceSpec
from testbed.messaging.mailbox import Mailbox
from testbed.method import Method, Options, PlannedMessage
from testbed.plan import Assignment, Plan
from testbed_generation.disk import Disk
from testbed_generation.formats import BLOCK
from testbed_generation.metrics import GenerationDetails
from testbed_generation.placement import Layers
from testbed_generation.planning import (
    CHOICES,
    cache_of,
    first_devices,
    free_memory,
    layer_capacity,
    middle_position,
    pass_seconds,
    ring_over,
    row_assignments,
    row_over,
    shards_of,
    window_assignments,
)
from testbed_generation.ring import (
    Ring,
    Windows,
    best_windows,
    even_windows,
    halda,
    memory_windows,
)
from testbed_generation.sharding import Shard, check_rows
from testbed_generation.workload import GenerateContext, GenerateProblem

if TYPE_CHECKING:
    from torch import Tensor

    from testbed_generation.messages import Assign
    from testbed_generation.tensor_parallel import Computing
    from testbed_generation.weights import Source


class StagesOptions(Options):
    """Options of methods whose devices hold ranges of layers."""

    partition: Literal["even", "memory", "latency", "throughput"] = Field(
        "latency",
        description="even: as many layers on each device; memory: in proportion to memory, as exo does; latency: the "
        "devices, order and layers with the least time of a token; throughput: those with the most tokens a second "
        "for many requests in flight. The last two may leave devices unused",
    )
    spares: tuple[str, ...] = Field(
        (), description="devices without layers, which take those of a lost stage"
    )
    recovery: Literal["restart", "replay", "replicate"] = Field(
        "restart",
        description="what happens when a stage is lost. restart: layers are assigned anew, and requests in flight "
        "begin at their prompts; replay: a replacement is sent again what the stage was sent (petals); replicate: each "
        "stage copies its KV caches to the next one, which takes over",
    )
    heartbeat: Duration = Field(
        0.25,
        gt=0,
        description="time between two questions whether the stages are there",
    )
    failure_timeout: Duration = Field(
        0.5, gt=0, description="time without an answer after which a stage is lost"
    )


class StagesDetails(GenerationDetails):
    """Predicted times of a plan with ranges of layers, in seconds."""

    token_time: float
    """Time of one decoded token in the middle of a text, without other requests."""
    bottleneck: float
    """Time between two tokens when many requests are in flight."""


class Sequential(Method[StagesOptions, StagesDetails]):
    """Each device holds a range of layers with their KV caches; values pass from one to the next."""

    name = "sequential"
    summary = (
        "generation: ranges of layers on devices in a row, several requests in flight"
    )
    tasks = ("generate",)
    Options = StagesOptions
    Details = StagesDetails
    supports = frozenset({"all_links"})
    span_names = frozenset({"embed", "draft", "prefill", "decode"})
    through_source: ClassVar[bool] = False
    """Whether each stage's values return to the source, which sends them to the next stage."""

    def plan(self, problem: GenerateProblem[StagesOptions]) -> Plan[StagesDetails]:
        """Choose devices and layers; raises `InputError` where the network does not fit."""
        if problem.options.recovery == "replay" and not self.through_source:
            raise InputError(
                "replays what the source has sent to each stage, and here stages send to each other: use the method "
                "'petals'",
                ("workload", "method", "recovery"),
            )
        if self.through_source or problem.options.recovery == "replicate":
            refuse_draft(
                problem, "use the method 'sequential' with 'recovery: restart'"
            )
        check_spares(problem, problem.options.spares)
        assignments, details = self.divide(
            problem, first_devices(problem, problem.options.spares)
        )
        return Plan(
            method=self.name,
            coordinator=problem.devices[0].name,
            assignments=assignments,
            step_time=details.token_time * problem.workload.tokens,
            details=details,
        )

    def divide(
        self, problem: GenerateProblem[StagesOptions], names: Sequence[str]
    ) -> tuple[tuple[Assignment, ...], StagesDetails]:
        """Return the assignments and the predicted times of a plan over some devices."""
        row = row_over(problem, names)
        layers = CHOICES[problem.options.partition](row)
        assignments = row_assignments(problem, layers)
        details = StagesDetails(
            cache=cache_of(problem, assignments),
            token_time=row.latency(layers),
            bottleneck=row.bottleneck(layers),
        )
        return assignments, details

    def layers_over(
        self, problem: GenerateProblem[StagesOptions], names: Sequence[str]
    ) -> Layers:
        """Return the stages over some devices; raises `InputError` where the network does not fit."""
        return CHOICES[problem.options.partition](row_over(problem, names))

    def disk_of(
        self, device: Device, problem: GenerateProblem[StagesOptions]
    ) -> Disk | None:
        """Return the disk of a device with layers beyond its memory; None if all layers stay in memory."""
        return None

    def largest_messages(
        self, problem: GenerateProblem[StagesOptions], plan: Plan[StagesDetails]
    ) -> Iterator[PlannedMessage]:
        """Return the values of the longest prompt between stages."""
        # All tokens of a prompt pass the stages together, all later ones singly or with a few drafts.
        longest = max(len(request.prompt) for request in problem.requests)
        size = problem.model.message_bytes(longest)
        names = [plan.coordinator, *plan.devices]
        for sender, receiver in pairwise(names):
            if sender != receiver:
                yield sender, receiver, size

    async def program(
        self, device: Device, context: GenerateContext[StagesOptions, StagesDetails]
    ) -> None:
        """Hold layers; on the source, serve the requests."""
        # Imported here, since only devices need torch.
        from testbed_generation.messages import KINDS
        from testbed_generation.programs import (
            draft_of,
            embedding_of,
            load_seconds,
            sampling_of,
            service_of,
            weights_of,
        )
        from testbed_generation.row import Row, RowOptions
        from testbed_generation.source import (
            AlongRow,
            Drive,
            Embedder,
            StageCalls,
            ThroughSource,
            serve_requests,
        )
        from testbed_generation.stage import Holder
        from testbed_generation.weights import Given

        problem, coordinator = context.problem, context.plan.coordinator
        options, model = problem.options, problem.model
        source = weights_of(context)
        async with Mailbox(device, problem.links, KINDS) as mailbox:
            holder = Holder(
                mailbox,
                coordinator,
                model,
                sampling_of(problem),
                # Layers that a device takes over come with their weights, unless these are drawn from the seed.
                lambda assign: source if not assign.weights else Given(assign.weights),
                lambda assign: load_seconds(problem, assign.last - assign.first),
                self.disk_of(device, problem),
            )
            if device.name != coordinator:
                # Until the end of the run, which cancels the programs of all devices but the coordinator's.
                await holder.serve_steps()
            # The source holds layers as well, and sends itself steps like any other stage.
            mailbox.start(holder.serve_steps())
            row = Row(
                mailbox,
                [device.name for device in problem.devices],
                partial(self._layers_over_reachable, problem),
                lambda name: layer_capacity(problem, problem.device(name)),
                RowOptions(
                    options.recovery, options.heartbeat, options.failure_timeout
                ),
                partial(_weights_to_send, context),
            )
            await row.assign_layers()
            embedder = Embedder(mailbox, model, embedding_of(source))
            calls = StageCalls(mailbox, model, options.heartbeat)
            drive: Drive
            if self.through_source:
                drive = ThroughSource(calls, row, embedder)
            else:
                drive = AlongRow(
                    device, calls, row, embedder, draft_of(device, context)
                )
            await serve_requests(device, drive, service_of(device, context))

    def _layers_over_reachable(
        self, problem: GenerateProblem[StagesOptions], reachable: Collection[str]
    ) -> Layers:
        """Return the stages over the reachable devices, with as few spares as possible; raises `InputError`."""
        options = problem.options
        planned = first_devices(problem, options.spares)
        names = [name for name in planned if name in reachable]
        spares = [name for name in options.spares if name in reachable]
        # Spares take layers only where the others have no room, one after the other.
        while True:
            try:
                return self.layers_over(problem, names)
            except InputError:
                if not spares:
                    raise
                names.append(spares.pop(0))


def _weights_to_send(
    context: GenerateContext[StagesOptions, StagesDetails], name: str, assign: Assign
) -> Mapping[str, Tensor]:
    """Return the weights that the source sends to a device with an assignment; empty if the device has them."""
    if context.weights is None or name == context.plan.coordinator:
        return {}
    for planned in context.plan.assignments_of(name):
        # Weights of planned layers were placed on the device before the run.
        if (planned.start, planned.stop) == (assign.first, assign.last):
            return {}
    # Imported here, since only devices need torch.
    from testbed_generation.weights import assigned_weights

    architecture = context.problem.model.architecture
    return assigned_weights(context.weights, architecture, assign)


class EdgeShard(Sequential):
    """Zhang et al. (2024): devices are chosen, and layers assigned, for the least latency or the most throughput."""

    name = "edgeshard"
    summary = "generation: devices chosen and layers assigned for latency or throughput (Zhang et al., 2024)"

    def plan(self, problem: GenerateProblem[StagesOptions]) -> Plan[StagesDetails]:
        """Choose devices and layers; raises `InputError` where the network does not fit."""
        if problem.options.partition not in ("latency", "throughput"):
            raise InputError(
                "EdgeShard optimizes latency or throughput: leave 'partition' out, or use the method 'sequential'",
                ("workload", "method", "partition"),
            )
        return super().plan(problem)


class PetalsOptions(StagesOptions):
    """Options of `Petals`."""

    recovery: Literal["replay", "restart"] = Field(
        "replay",
        description="what happens when a stage is lost. replay: a replacement is sent again what the stage was sent; "
        "restart: requests in flight begin at their prompts",
    )


class Petals(Sequential):
    """Borzunov et al. (2023): the client keeps the inputs of each server, and replaces lost servers.

    The client is our source, the servers are the other stages.
    """

    name = "petals"
    summary = "generation: the client keeps what it sent to each stage and replaces lost ones (Borzunov et al., 2023)"
    Options = PetalsOptions
    through_source = True


class RingOptions(StagesOptions):
    """Options of `PipedRing`."""

    partition: Literal["halda", "even", "memory"] = Field(  # type: ignore[assignment]
        "halda",
        description="halda: the windows with the least time of a token by the integer program of prima.cpp, which may "
        "leave devices unused; even: equal windows; memory: windows in proportion to free memory, as exo does",
    )
    recovery: Literal["restart", "replicate"] = Field(
        "restart",
        description="what happens when a device is lost. restart: layers are assigned anew, and requests in flight "
        "begin at their prompts; replicate: each device copies its KV caches to the next one, which takes over",
    )
    rounds: int | None = Field(
        None,
        ge=1,
        description="how often a token passes the ring; default: the divisor of the number of layers with the least "
        "time of a token",
    )
    disk: dict[str, ByteRate] = Field(
        {},
        description="devices with their rates of reading layers that do not fit into their memory; all others hold "
        "their layers in memory",
    )
    prefetch: bool = Field(
        True,
        description="whether a device reads its next window from its disk while other devices compute",
    )


class PipedRing(Sequential):
    """Li et al. (2025): layers are assigned round a ring several times, and may be read from disks.

    `testbed_generation.ring` explains windows and rounds.
    """

    name = "ring"
    summary = "generation: layers round a ring several times, disks included (prima.cpp; Li et al., 2025)"
    Options = RingOptions

    def divide(
        self, problem: GenerateProblem[StagesOptions], names: Sequence[str]
    ) -> tuple[tuple[Assignment, ...], StagesDetails]:
        """Return the windows of all rounds as assignments, and the predicted times."""
        check_known(problem, _ring_options(problem).disk, "disk")
        ring = self._ring(problem, names)
        windows = self._windows(problem, ring)
        assignments = window_assignments(problem, windows.stages())
        details = StagesDetails(
            cache=cache_of(problem, assignments),
            token_time=windows.token_seconds(ring),
            bottleneck=windows.busiest_seconds(ring),
        )
        return assignments, details

    def layers_over(
        self, problem: GenerateProblem[StagesOptions], names: Sequence[str]
    ) -> Layers:
        """Return the stages of all rounds over some devices."""
        return self._windows(problem, self._ring(problem, names)).stages()

    def disk_of(
        self, device: Device, problem: GenerateProblem[StagesOptions]
    ) -> Disk | None:
        """Return the disk of a device; None without a rate in the scenario."""
        rate = _ring_options(problem).disk.get(device.name)
        if rate is None:
            return None
        spec = problem.device(device.name)
        # The head of the ring has the output matrix, since a token returns there after the last round.
        is_head = spec is problem.devices[0]
        memory = free_memory(problem, spec, holds_output=is_head)
        return Disk(
            device,
            rate,
            memory,
            problem.model.layer_memory(),
            prefetch=_ring_options(problem).prefetch,
        )

    def _ring(
        self, problem: GenerateProblem[StagesOptions], names: Sequence[str]
    ) -> Ring:
        options = _ring_options(problem)
        return ring_over(problem, names, options.disk, prefetch=options.prefetch)

    def _windows(self, problem: GenerateProblem[StagesOptions], ring: Ring) -> Windows:
        options = _ring_options(problem)
        return best_windows(ring, WINDOWS[options.partition], options.rounds)


WINDOWS = {"halda": halda, "even": even_windows, "memory": memory_windows}
"""Rules that assign windows, by their names in a scenario."""


def _ring_options(problem: GenerateProblem[StagesOptions]) -> RingOptions:
    assert isinstance(problem.options, RingOptions)
    return problem.options


def refuse_draft(problem: GenerateProblem[Any], remedy: str) -> None:
    """Raise `InputError` where the scenario has a draft model, which a method cannot use."""
    if problem.draft is not None:
        raise InputError(
            f"tokens are generated one by one here: leave it out, or {remedy}",
            ("workload", "draft"),
        )


def check_known(
    problem: GenerateProblem[Any], names: Collection[str], key: str
) -> None:
    """Raise `InputError` for an unknown device in an option of a method."""
    known = [device.name for device in problem.devices]
    for name in names:
        if name not in known:
            raise InputError(
                f"unknown device '{name}': {nearest(name, known)}",
                ("workload", "method", key),
            )


def check_spares(problem: GenerateProblem[Any], spares: Collection[str]) -> None:
    """Raise `InputError` for an unknown spare, and where the source is a spare."""
    check_known(problem, spares, "spares")
    source = problem.devices[0].name
    if source in spares:
        raise InputError(
            f"{source}, the first device, is the source of requests and holds layers: name other devices",
            ("workload", "method", "spares"),
        )


def check_memory(device: DeviceSpec, memory: float) -> None:
    """Raise `InputError` if a device has less memory than ``memory`` bytes."""
    if memory > device.memory:
        raise InputError(
            f"{device.name} needs {memory / 1e9:.2f} GB for its part of the layers and has "
            f"{device.memory / 1e9:.2f} GB: add devices, shorten the sequences, or store in fewer bits",
            ("devices",),
        )


class ShardsOptions(Options):
    """Options of `TensorParallel`."""

    reduce: Literal["star", "ring", "exchange"] = Field(
        "star",
        description="star: parts are added up on the source; ring: in pieces round a ring of all devices; exchange: "
        "every device sends its part to every other one, as distributed-llama does from version 0.7 on",
    )
    shares: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(
        None,
        description="how much of a layer each device holds; default: in proportion to its rate for decoding",
    )
    dataflow: Literal["all-reduce", "gather"] = Field(
        "all-reduce",
        description="all-reduce: devices hold heads and hidden columns and add up their results twice a layer; gather: "
        "devices hold rows of each matrix, and the source alone attends, sends all inputs and gathers all outputs, as "
        "distributed-llama of January 2024 does",
    )
    transport: Literal["f32", "q8_0"] = Field(
        "f32",
        description="values on the wire with gather or exchange. q8_0: 34 bytes for 32 values; with gather, layers "
        "then multiply 8-bit integers, whose time is that of reading the weights",
    )
    power_of_two: bool = Field(
        False, description="refuse other numbers of devices, as distributed-llama does"
    )


class TensorParallel(Method[ShardsOptions, GenerationDetails]):
    """Every device holds some heads and hidden columns of every layer, and all add up their results twice a layer."""

    name = "tensor-parallel"
    summary = "generation: heads and hidden columns of every layer on every device, with all-reduce"
    tasks = ("generate",)
    Options = ShardsOptions
    Details = GenerationDetails
    span_names = frozenset(
        {
            "embed",
            "attention",
            "feed_forward",
            "qkv",
            "output",
            "hidden",
            "down",
            "choose",
        }
    )

    def plan(self, problem: GenerateProblem[ShardsOptions]) -> Plan[GenerationDetails]:
        """Divide the layers; raises `InputError` for too many devices or too little memory."""
        refuse_draft(problem, "use the method 'sequential'")
        options, number = problem.options, len(problem.devices)
        # A power of two has one bit set; subtracting 1 clears this bit and sets all lower ones, so nothing is common.
        if options.power_of_two and number & (number - 1):
            raise InputError(
                f"{number} devices are no power of two: use 1, 2, 4, 8, ... devices, or leave 'power_of_two' out",
                ("workload", "method", "power_of_two"),
            )
        if options.dataflow == "gather":
            return self._plan_gather(problem)
        if options.transport != "f32" and options.reduce != "exchange":
            raise InputError(
                "sums travel in f32: leave 'transport' out, or use 'reduce: exchange' or 'dataflow: gather'",
                ("workload", "method", "transport"),
            )
        if options.shares is not None and len(options.shares) != number:
            raise InputError(
                f"{len(options.shares)} shares for {number} devices: give one for each device",
                ("workload", "method", "shares"),
            )
        assignments = []
        cache = {}
        shards = shards_of(problem, options.shares)
        architecture = problem.model.architecture
        for device, shard in zip(problem.devices, shards, strict=True):
            assignments.append(self._assign_shard(problem, device, shard))
            # A device keeps the caches of its own heads only.
            share = shard.heads / architecture.kv_heads
            cache[device.name] = (
                share * architecture.layers * problem.model.layer_cache()
            )
        return self._plan(problem, assignments, cache)

    def _assign_shard(
        self, problem: GenerateProblem[ShardsOptions], device: DeviceSpec, shard: Shard
    ) -> Assignment:
        """Return a device's heads and hidden columns of all layers as an assignment."""
        model, architecture = problem.model, problem.model.architecture
        # The source alone embeds tokens and multiplies with the output matrix.
        is_source = device is problem.devices[0]
        share = shard.heads / architecture.kv_heads
        layers = model.layer_memory() * architecture.layers * share
        ends = model.end_memory(first=is_source, last=is_source)
        memory = layers + model.buffer_memory() + ends
        part = f"heads {shard.first_head} to {shard.last_head - 1}"
        parameters = architecture.layers * shard.parameters(architecture)
        assignment = self._assign(problem, device, memory, part, parameters)
        cost = partial(model.shard_layers, shard)
        seconds = pass_seconds(problem, device, cost, is_last=is_source)
        flops = model.shard_layers(shard, 1, middle_position(problem)).of().flops
        return assignment.model_copy(update={"pass_seconds": seconds, "flops": flops})

    def _plan_gather(
        self, problem: GenerateProblem[ShardsOptions]
    ) -> Plan[GenerationDetails]:
        """Give all devices equal rows of each matrix, and the source all caches."""
        model, architecture = problem.model, problem.model.architecture
        source, number = problem.devices[0], len(problem.devices)
        options = problem.options
        if options.shares is not None:
            raise InputError(
                "with 'dataflow: gather' all devices hold equal parts: leave 'shares' out",
                ("workload", "method", "shares"),
            )
        # A block of Q8_0 cannot cross two devices.
        check_rows(architecture, number, BLOCK if options.transport == "q8_0" else 1)
        parameters = architecture.layers * architecture.layer_values // number
        weights = architecture.layers * architecture.layer_bytes(model.storage)
        caches = architecture.layers * model.layer_cache()
        assignments = []
        for place, device in enumerate(problem.devices, start=1):
            memory = weights / number + model.buffer_memory()
            if device is source:
                memory += caches + model.end_memory(first=True, last=True)
            part = f"rows {place} of {number}"
            assignment = self._assign(problem, device, memory, part, parameters)
            assignments.append(assignment)
        return self._plan(problem, assignments, {source.name: caches})

    def _assign(
        self,
        problem: GenerateProblem[ShardsOptions],
        device: DeviceSpec,
        memory: float,
        part: str,
        parameters: int,
    ) -> Assignment:
        check_memory(device, memory)
        return Assignment(
            device=device.name,
            # Every device has a part of every layer.
            start=0,
            stop=problem.model.architecture.layers,
            memory=memory,
            part=part,
            parameters=parameters,
        )

    def _plan(
        self,
        problem: GenerateProblem[ShardsOptions],
        assignments: Sequence[Assignment],
        cache: dict[str, float],
    ) -> Plan[GenerationDetails]:
        return Plan(
            method=self.name,
            coordinator=problem.devices[0].name,
            assignments=tuple(assignments),
            details=GenerationDetails(cache=cache),
        )

    async def program(
        self, device: Device, context: GenerateContext[ShardsOptions, GenerationDetails]
    ) -> None:
        """Hold a shard; on the source, serve the requests."""
        if context.problem.options.dataflow == "gather":
            await self._gather_rows(device, context)
        else:
            await self._reduce_shards(device, context)

    async def _gather_rows(
        self, device: Device, context: GenerateContext[ShardsOptions, GenerationDetails]
    ) -> None:
        # Imported here, since only devices need torch.
        from testbed_generation import gather
        from testbed_generation.programs import weights_of
        from testbed_generation.transport import Transport

        problem = context.problem
        names = [each.name for each in problem.devices]
        source = weights_of(context)
        async with Mailbox(device, problem.links, gather.KINDS) as mailbox:
            transport = Transport(problem.options.transport)
            place = names.index(device.name)
            rows = gather.Rows(problem.model, place, len(names), transport, source)
            if device.name != context.plan.coordinator:
                # Until the end of the run, which the coordinator's program ends.
                await gather.serve_rows(mailbox, context.plan.coordinator, rows)
            own = gather.GatherSource(mailbox, names[1:], rows, source)
            # No device but the source is sent a whole forward: workers get the inputs of each product.
            await self._serve_requests(context, mailbox, names[:1], own, source)

    async def _reduce_shards(
        self, device: Device, context: GenerateContext[ShardsOptions, GenerationDetails]
    ) -> None:
        # Imported here, since only devices need torch.
        from testbed_generation.collectives import make_all_reduce
        from testbed_generation.programs import weights_of
        from testbed_generation.tensor_parallel import KINDS, ShardHolder
        from testbed_generation.transport import Transport

        problem, options = context.problem, context.problem.options
        names = [each.name for each in problem.devices]
        source = weights_of(context)
        async with Mailbox(device, problem.links, KINDS) as mailbox:
            transport = Transport(options.transport)
            reduce = make_all_reduce(options.reduce, mailbox, names, transport)
            shard = shards_of(problem, options.shares)[names.index(device.name)]
            holder = ShardHolder(mailbox, problem.model, shard, source, reduce)
            if device.name != context.plan.coordinator:
                # Until the end of the run, which the coordinator's program ends.
                await holder.serve_forwards()
            await self._serve_requests(context, mailbox, names, holder, source)

    async def _serve_requests(
        self,
        context: GenerateContext[ShardsOptions, GenerationDetails],
        mailbox: Mailbox,
        names: Sequence[str],
        own: Computing,
        source: Source | None,
    ) -> None:
        """Serve the requests on the source; see `TensorParallelSource` for the arguments."""
        # Imported here, since only devices need torch.
        from testbed_generation.programs import (
            embedding_of,
            sampling_of,
            service_of,
        )
        from testbed_generation.source import Embedder, serve_requests
        from testbed_generation.tensor_parallel import TensorParallelSource

        problem = context.problem
        embedder = Embedder(mailbox, problem.model, embedding_of(source))
        sampling = sampling_of(problem)
        drive = TensorParallelSource(
            mailbox, problem.model, names, own, embedder, sampling, source
        )
        await serve_requests(mailbox.device, drive, service_of(mailbox.device, context))
