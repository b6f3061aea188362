"""Methods of the workload ``generate``.

`Sequential` and the classes derived from it are pipelines: each stage holds a range of layers. `TensorParallel` gives
every device a part of every layer. Planning needs no torch, so this module imports the modules of programs only when a
program runs.
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
from testbed_generation.placement import LayerCounts
from testbed_generation.planning import (
    PARTITION_RULES,
    device_cache_bytes,
    devices_without_spares,
    free_memory,
    layer_capacity,
    make_placement_problem,
    make_ring,
    make_shards,
    make_stage_assignments,
    make_window_assignments,
    middle_position,
    pass_seconds,
)
from testbed_generation.ring import (
    Ring,
    Windows,
    best_windows,
    even_windows,
    halda,
    memory_windows,
)
from testbed_generation.sharding import Shard, check_row_division
from testbed_generation.workload import GenerateContext, GenerateProblem

if TYPE_CHECKING:
    from torch import Tensor

    from testbed_generation.decoding import Decoder, Embedder
    from testbed_generation.messages import Assign
    from testbed_generation.pipeline import Pipeline
    from testbed_generation.stage import StageServer
    from testbed_generation.tensor_parallel import LocalPart
    from testbed_generation.weights import WeightSource

WINDOW_RULES = {"halda": halda, "even": even_windows, "memory": memory_windows}
"""Rules by which a ring divides its layers into windows, by their names in a scenario."""


class StagesOptions(Options):
    """Division of layers into ranges, spare devices, and recovery from a lost stage."""

    partition: Literal["even", "memory", "latency", "throughput"] = Field(
        "latency",
        description="even: as many layers on each device; memory: in proportion to memory, as exo does; latency: the "
        "devices, their order and layers with the shortest time per token; throughput: the devices, their order and "
        "layers that generate most tokens per second with many requests in flight. latency and throughput may leave "
        "devices unused",
    )
    spares: tuple[str, ...] = Field(
        (),
        description="devices that hold no layers until they replace a lost stage",
    )
    recovery: Literal["restart", "replay", "replicate"] = Field(
        "restart",
        description="recovery from a lost stage. restart: layers are assigned anew, and requests in flight start "
        "again from their prompts; replay: the coordinator sends a replacement all inputs of the lost stage again "
        "(petals); replicate: each stage copies its KV caches to the next stage, which replaces it",
    )
    heartbeat: Duration = Field(
        0.25,
        gt=0,
        description="interval between health checks of the stages",
    )
    failure_timeout: Duration = Field(
        0.5,
        gt=0,
        description="time without an answer after which a stage counts as lost",
    )


class StagesDetails(GenerationDetails):
    """Predicted times of a plan with ranges of layers, in seconds."""

    token_time: float
    """Time of one decoded token in the middle of a text, without other requests."""
    bottleneck: float
    """Time between two tokens when many requests are in flight."""


class Sequential(Method[StagesOptions, StagesDetails]):
    """A pipeline: each device holds a range of layers with KV caches, and forwards activations to the next device."""

    name = "sequential"
    summary = (
        "generation: a pipeline of ranges of layers, with several requests in flight"
    )
    tasks = ("generate",)
    Options = StagesOptions
    Details = StagesDetails
    supports = frozenset({"all_links"})
    span_names = frozenset({"embed", "draft", "prefill", "decode"})
    relays_through_coordinator: ClassVar[bool] = False
    """Whether each stage returns activations to the coordinator, which sends them to the next stage."""

    def plan(self, problem: GenerateProblem[StagesOptions]) -> Plan[StagesDetails]:
        """Choose devices and divide the layers; raises `InputError` if the model does not fit into memory."""
        if problem.options.recovery == "replay" and not self.relays_through_coordinator:
            raise InputError(
                "recovery by replay needs a coordinator that sends each stage its inputs, and here stages send to each "
                "other: use the method 'petals'",
                ("workload", "method", "recovery"),
            )
        if self.relays_through_coordinator or problem.options.recovery == "replicate":
            refuse_draft(
                problem, "use the method 'sequential' with 'recovery: restart'"
            )
        check_spares(problem, problem.options.spares)
        names = devices_without_spares(problem, problem.options.spares)
        assignments, details = self.divide(problem, names)
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
        """Return the assignments and the predicted times of a plan with the devices ``names``."""
        layer_counts = self.assign_layers(problem, names)
        assignments = make_stage_assignments(problem, layer_counts)
        placement_problem = make_placement_problem(problem, names)
        details = StagesDetails(
            cache=device_cache_bytes(problem, assignments),
            token_time=placement_problem.latency(layer_counts),
            bottleneck=placement_problem.bottleneck(layer_counts),
        )
        return assignments, details

    def assign_layers(
        self, problem: GenerateProblem[StagesOptions], names: Sequence[str]
    ) -> LayerCounts:
        """Return the stages on the devices ``names``; raises `InputError` if the model does not fit into memory."""
        divide_layers = PARTITION_RULES[problem.options.partition]
        return divide_layers(make_placement_problem(problem, names))

    def make_disk(
        self, device: Device, problem: GenerateProblem[StagesOptions]
    ) -> Disk | None:
        """Return the disk of a device with layers beyond its memory; None if all layers stay in memory."""
        return None

    def largest_messages(
        self, problem: GenerateProblem[StagesOptions], plan: Plan[StagesDetails]
    ) -> Iterator[PlannedMessage]:
        """Return the activations of the longest prompt between consecutive stages."""
        # All tokens of a prompt pass the stages together, and later tokens one by one or with a few drafts.
        prompt_tokens = max(len(request.prompt) for request in problem.requests)
        size = problem.model.message_bytes(prompt_tokens)
        names = [plan.coordinator, *plan.devices]
        for sender, receiver in pairwise(names):
            if sender != receiver:
                yield sender, receiver, size

    async def program(
        self, device: Device, context: GenerateContext[StagesOptions, StagesDetails]
    ) -> None:
        """Hold layers; on the coordinator, serve the requests as well."""
        # Imported here, since only devices need torch.
        from testbed_generation.decoding import Embedder, serve_requests
        from testbed_generation.messages import KINDS
        from testbed_generation.programs import (
            make_service,
            open_weight_source,
            read_embedding,
        )

        problem = context.problem
        weight_source = open_weight_source(context)
        async with Mailbox(device, problem.links, KINDS) as mailbox:
            server = self._make_server(mailbox, context, weight_source)
            if device.name != context.plan.coordinator:
                # Never returns: the end of the run cancels this program.
                await server.serve_steps()
                return
            # The coordinator holds layers as well, and sends itself steps like any other stage.
            mailbox.start(server.serve_steps())
            pipeline = self._make_pipeline(mailbox, context)
            await pipeline.assign_layers()
            embedder = Embedder(mailbox, problem.model, read_embedding(weight_source))
            decoder = self._make_decoder(mailbox, context, pipeline, embedder)
            await serve_requests(device, decoder, make_service(device, context))

    def _make_server(
        self,
        mailbox: Mailbox,
        context: GenerateContext[StagesOptions, StagesDetails],
        weight_source: WeightSource | None,
    ) -> StageServer:
        # Imported here, since only devices need torch.
        from testbed_generation.programs import load_seconds, make_sampling
        from testbed_generation.stage import StageServer
        from testbed_generation.weights import ReceivedWeights

        problem = context.problem

        def weight_source_for(assign: Assign) -> WeightSource | None:
            # The message has the weights of layers that a device takes over, unless they are drawn from the seed.
            if assign.weights:
                return ReceivedWeights(assign.weights)
            return weight_source

        def assignment_load_seconds(assign: Assign) -> float:
            return load_seconds(problem, assign.last - assign.first)

        return StageServer(
            mailbox,
            coordinator=context.plan.coordinator,
            model=problem.model,
            sampling=make_sampling(problem),
            weight_source_for=weight_source_for,
            load_seconds=assignment_load_seconds,
            disk=self.make_disk(mailbox.device, problem),
        )

    def _make_pipeline(
        self, mailbox: Mailbox, context: GenerateContext[StagesOptions, StagesDetails]
    ) -> Pipeline:
        # Imported here, since only devices need torch.
        from testbed_generation.pipeline import Pipeline, PipelineOptions

        problem, options = context.problem, context.problem.options

        def device_capacity(name: str) -> int:
            return layer_capacity(problem, problem.device(name))

        return Pipeline(
            mailbox,
            devices=[device.name for device in problem.devices],
            divide_layers=partial(self._assign_to_reachable, problem),
            layer_capacity=device_capacity,
            options=PipelineOptions(
                options.recovery,
                heartbeat=options.heartbeat,
                failure_timeout=options.failure_timeout,
            ),
            weights_to_send=partial(_weights_to_send, context),
        )

    def _make_decoder(
        self,
        mailbox: Mailbox,
        context: GenerateContext[StagesOptions, StagesDetails],
        pipeline: Pipeline,
        embedder: Embedder,
    ) -> Decoder:
        # Imported here, since only devices need torch.
        from testbed_generation.decoding import (
            ForwardingDecoder,
            RelayingDecoder,
            StageClient,
        )
        from testbed_generation.programs import make_draft

        problem, device = context.problem, mailbox.device
        client = StageClient(mailbox, problem.model, problem.options.heartbeat)
        if self.relays_through_coordinator:
            return RelayingDecoder(client, pipeline, embedder)
        draft = make_draft(device, context)
        return ForwardingDecoder(device, client, pipeline, embedder, draft)

    def _assign_to_reachable(
        self, problem: GenerateProblem[StagesOptions], reachable: Collection[str]
    ) -> LayerCounts:
        """Return the stages on the reachable devices, with as few spares as possible.

        Raises `InputError` if the model does not fit into the memory of these devices.
        """
        spares = problem.options.spares
        planned = devices_without_spares(problem, spares)
        names = [name for name in planned if name in reachable]
        reachable_spares = [name for name in spares if name in reachable]
        # Spares take layers only if the other devices have no room, one after the other.
        for spare in reachable_spares:
            try:
                return self.assign_layers(problem, names)
            except InputError:
                names.append(spare)
        return self.assign_layers(problem, names)


def _weights_to_send(
    context: GenerateContext[StagesOptions, StagesDetails], name: str, assign: Assign
) -> Mapping[str, Tensor]:
    """Return the weights sent by the coordinator with an assignment; empty if the device has them."""
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
    """Zhang et al. (2024): devices are chosen, and layers assigned, for the lowest latency or highest throughput."""

    name = "edgeshard"
    summary = "generation: devices chosen and layers assigned for latency or throughput (Zhang et al., 2024)"

    def plan(self, problem: GenerateProblem[StagesOptions]) -> Plan[StagesDetails]:
        """Choose devices and divide the layers; raises `InputError` if the model does not fit into memory."""
        if problem.options.partition not in ("latency", "throughput"):
            raise InputError(
                "EdgeShard optimizes latency or throughput: leave 'partition' out, or use the method 'sequential'",
                ("workload", "method", "partition"),
            )
        return super().plan(problem)


class PetalsOptions(StagesOptions):
    """As `StagesOptions`, with other kinds of recovery."""

    recovery: Literal["replay", "restart"] = Field(
        "replay",
        description="recovery from a lost stage. replay: the coordinator sends a replacement all inputs of the lost "
        "stage again; restart: layers are assigned anew, and requests in flight start again from their prompts",
    )


class Petals(Sequential):
    """Borzunov et al. (2023): the client keeps the inputs of each server, and replaces lost servers.

    The client of the paper is the coordinator here, and its servers are the other stages.
    """

    name = "petals"
    summary = "generation: the coordinator keeps the inputs of stages and replaces lost stages (Borzunov et al., 2023)"
    Options = PetalsOptions
    relays_through_coordinator = True


class RingOptions(StagesOptions):
    """Division of layers into rounds and windows, disks, and recovery from a lost device."""

    partition: Literal["halda", "even", "memory"] = Field(  # type: ignore[assignment]
        "halda",
        description="halda: the windows with the shortest time per token by Halda, the layer assignment algorithm of "
        "prima.cpp, which may leave devices unused; even: equal windows; memory: windows in proportion to free memory, "
        "as exo does",
    )
    recovery: Literal["restart", "replicate"] = Field(
        "restart",
        description="recovery from a lost device. restart: layers are assigned anew, and requests in flight start "
        "again from their prompts; replicate: each device copies its KV caches to the next device, which replaces it",
    )
    rounds: int | None = Field(
        None,
        ge=1,
        description="how many times a token goes round the ring; default: the divisor of the number of layers with "
        "the shortest time per token",
    )
    disk: dict[str, ByteRate] = Field(
        {},
        description="rates at which devices read layers that do not fit into their memory; all other devices hold "
        "their layers in memory",
    )
    prefetch: bool = Field(
        True,
        description="whether a device reads its next window from its disk while other devices compute",
    )


class PipedRing(Sequential):
    """Li et al. (2025): a token goes round a ring of devices several times, and layers may be read from disks.

    `testbed_generation.ring` explains windows and rounds.
    """

    name = "ring"
    summary = "generation: layers round a ring several times, disks included (prima.cpp; Li et al., 2025)"
    Options = RingOptions

    def divide(
        self, problem: GenerateProblem[StagesOptions], names: Sequence[str]
    ) -> tuple[tuple[Assignment, ...], StagesDetails]:
        """Return the windows of all rounds as assignments, and the predicted times."""
        check_device_names(problem, _ring_options(problem).disk, "disk")
        ring = self._make_ring(problem, names)
        windows = self._assign_windows(problem, ring)
        assignments = make_window_assignments(problem, windows.stages())
        details = StagesDetails(
            cache=device_cache_bytes(problem, assignments),
            token_time=windows.token_seconds(ring),
            bottleneck=windows.busiest_seconds(ring),
        )
        return assignments, details

    def assign_layers(
        self, problem: GenerateProblem[StagesOptions], names: Sequence[str]
    ) -> LayerCounts:
        """Return the stages of all rounds on the devices ``names``."""
        ring = self._make_ring(problem, names)
        return self._assign_windows(problem, ring).stages()

    def make_disk(
        self, device: Device, problem: GenerateProblem[StagesOptions]
    ) -> Disk | None:
        """Return the disk of a device; None without a rate in the scenario."""
        options = _ring_options(problem)
        disk_rate = options.disk.get(device.name)
        if disk_rate is None:
            return None
        spec = problem.device(device.name)
        # The head of the ring has the output matrix, since a token returns to the head after the last round.
        is_head = spec is problem.devices[0]
        return Disk(
            device,
            disk_rate,
            memory=free_memory(problem, spec, holds_output=is_head),
            layer_bytes=problem.model.layer_memory(),
            prefetch=options.prefetch,
        )

    def _make_ring(
        self, problem: GenerateProblem[StagesOptions], names: Sequence[str]
    ) -> Ring:
        options = _ring_options(problem)
        return make_ring(problem, names, options.disk, prefetch=options.prefetch)

    def _assign_windows(
        self, problem: GenerateProblem[StagesOptions], ring: Ring
    ) -> Windows:
        options = _ring_options(problem)
        return best_windows(ring, WINDOW_RULES[options.partition], options.rounds)


def _ring_options(problem: GenerateProblem[StagesOptions]) -> RingOptions:
    # The testbed creates the problem of a method with its class `Options`, here `RingOptions`.
    assert isinstance(problem.options, RingOptions)
    return problem.options


def refuse_draft(problem: GenerateProblem[Any], remedy: str) -> None:
    """Raise `InputError` if the scenario has a draft model; ``remedy``, such as another method, ends the message."""
    if problem.draft is not None:
        raise InputError(
            f"this method generates one token at a time: leave 'draft' out, or {remedy}",
            ("workload", "draft"),
        )


def check_device_names(
    problem: GenerateProblem[Any], names: Collection[str], key: str
) -> None:
    """Raise `InputError` for an unknown device in the option ``key`` of a method."""
    device_names = [device.name for device in problem.devices]
    for name in names:
        if name not in device_names:
            raise InputError(
                f"unknown device '{name}': {nearest(name, device_names)}",
                ("workload", "method", key),
            )


def check_spares(problem: GenerateProblem[Any], spares: Collection[str]) -> None:
    """Raise `InputError` for an unknown spare, and if the coordinator is a spare."""
    check_device_names(problem, spares, "spares")
    coordinator = problem.devices[0].name
    if coordinator in spares:
        raise InputError(
            f"{coordinator}, the first device, is the coordinator, which always holds layers: name other devices",
            ("workload", "method", "spares"),
        )


def check_memory(device: DeviceSpec, memory: float) -> None:
    """Raise `InputError` if a device has less memory than ``memory`` bytes."""
    if memory > device.memory:
        raise InputError(
            f"{device.name} needs {memory / 1e9:.2f} GB for its part of the layers and has "
            f"{device.memory / 1e9:.2f} GB: add devices, shorten the sequences, or store the weights in fewer bits",
            ("devices",),
        )


class ShardsOptions(Options):
    """Parts of each layer by device, and the exchange of their results."""

    reduce: Literal["star", "ring", "exchange"] = Field(
        "star",
        description="star: the coordinator adds up the results of all devices; ring: results are added up in pieces "
        "round a ring of all devices; exchange: every device sends its results to every other device, as "
        "distributed-llama does from version 0.7 on",
    )
    shares: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(
        None,
        description="share of each layer that each device holds; default: in proportion to its decoding rate",
    )
    dataflow: Literal["all-reduce", "gather"] = Field(
        "all-reduce",
        description="all-reduce: devices hold heads and hidden columns, and add up their results twice per layer; "
        "gather: devices hold rows of each matrix; the coordinator alone attends, sends all inputs and gathers all "
        "outputs, as distributed-llama of January 2024 does",
    )
    transport: Literal["f32", "q8_0"] = Field(
        "f32",
        description="format of activations on the wire with gather or exchange. q8_0: 34 bytes for 32 values; with "
        "gather, layers then multiply 8-bit integers, which takes the time of reading the weights",
    )
    power_of_two: bool = Field(
        False,
        description="refuse numbers of devices that are not powers of two, as distributed-llama does",
    )


class TensorParallel(Method[ShardsOptions, GenerationDetails]):
    """Every device holds a part of every layer.

    With ``dataflow: all-reduce`` this is some heads and hidden columns, and the devices add up their results twice per
    layer; with ``dataflow: gather`` it is some rows of each matrix, and the coordinator gathers the results.
    """

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
        options, device_count = problem.options, len(problem.devices)
        # A power of two has a single bit.
        if options.power_of_two and device_count.bit_count() != 1:
            raise InputError(
                f"{device_count} devices are not a power of two: use 1, 2, 4, 8, ... devices, or leave 'power_of_two' "
                "out",
                ("workload", "method", "power_of_two"),
            )
        if options.dataflow == "gather":
            return self._make_gather_plan(problem)
        if options.transport != "f32" and options.reduce != "exchange":
            raise InputError(
                "star and ring send activations in f32: leave 'transport' out, or use 'reduce: exchange' or "
                "'dataflow: gather'",
                ("workload", "method", "transport"),
            )
        if options.shares is not None and len(options.shares) != device_count:
            raise InputError(
                f"{len(options.shares)} shares for {device_count} devices: give one for each device",
                ("workload", "method", "shares"),
            )
        assignments = []
        cache = {}
        shards = make_shards(problem, options.shares)
        architecture = problem.model.architecture
        for device, shard in zip(problem.devices, shards, strict=True):
            assignments.append(self._make_shard_assignment(problem, device, shard))
            # A device keeps the caches of its own heads only.
            share = shard.heads / architecture.kv_heads
            cache[device.name] = (
                share * architecture.layers * problem.model.layer_cache()
            )
        return self._make_plan(problem, assignments, cache)

    def _make_shard_assignment(
        self, problem: GenerateProblem[ShardsOptions], device: DeviceSpec, shard: Shard
    ) -> Assignment:
        """Return a device's heads and hidden columns of all layers as an assignment."""
        model, architecture = problem.model, problem.model.architecture
        # The coordinator alone embeds tokens and multiplies with the output matrix.
        is_coordinator = device is problem.devices[0]
        share = shard.heads / architecture.kv_heads
        layer_memory = model.layer_memory() * architecture.layers * share
        end_memory = model.end_memory(
            has_embedding=is_coordinator, has_output=is_coordinator
        )
        memory = layer_memory + model.buffer_memory() + end_memory
        part = f"heads {shard.head_start} to {shard.head_stop - 1}"
        parameters = architecture.layers * shard.parameters(architecture)
        assignment = self._make_assignment(problem, device, memory, part, parameters)
        cost = partial(model.shard_cost, shard)
        seconds = pass_seconds(problem, device, cost, is_last=is_coordinator)
        flops = model.shard_cost(shard, 1, middle_position(problem)).of().flops
        return assignment.model_copy(update={"pass_seconds": seconds, "flops": flops})

    def _make_gather_plan(
        self, problem: GenerateProblem[ShardsOptions]
    ) -> Plan[GenerationDetails]:
        """Assign equal numbers of rows of each matrix to all devices, and all caches to the coordinator."""
        model, architecture = problem.model, problem.model.architecture
        coordinator, device_count = problem.devices[0], len(problem.devices)
        options = problem.options
        if options.shares is not None:
            raise InputError(
                "with 'dataflow: gather' all devices hold equal parts: leave 'shares' out",
                ("workload", "method", "shares"),
            )
        # The values of a block of Q8_0 must be on one device.
        block = BLOCK if options.transport == "q8_0" else 1
        check_row_division(architecture, device_count, block)
        parameters = architecture.layers * architecture.layer_values // device_count
        weights = architecture.layers * architecture.layer_bytes(model.storage)
        caches = architecture.layers * model.layer_cache()
        assignments = []
        for part_number, device in enumerate(problem.devices, start=1):
            memory = weights / device_count + model.buffer_memory()
            if device is coordinator:
                memory += caches + model.end_memory(has_embedding=True, has_output=True)
            part = f"rows {part_number} of {device_count}"
            assignment = self._make_assignment(
                problem, device, memory, part, parameters
            )
            assignments.append(assignment)
        return self._make_plan(problem, assignments, {coordinator.name: caches})

    def _make_assignment(
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

    def _make_plan(
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
        """Hold a part of every layer; on the coordinator, serve the requests as well."""
        if context.problem.options.dataflow == "gather":
            await self._gather_rows(device, context)
        else:
            await self._reduce_shards(device, context)

    async def _gather_rows(
        self, device: Device, context: GenerateContext[ShardsOptions, GenerationDetails]
    ) -> None:
        # Imported here, since only devices need torch.
        from testbed_generation import gather
        from testbed_generation.programs import open_weight_source
        from testbed_generation.transport import Transport

        problem, coordinator = context.problem, context.plan.coordinator
        names = [spec.name for spec in problem.devices]
        weight_source = open_weight_source(context)
        async with Mailbox(device, problem.links, gather.KINDS) as mailbox:
            rows = gather.MatrixRows(
                problem.model,
                part=names.index(device.name),
                parts=len(names),
                transport=Transport(problem.options.transport),
                weight_source=weight_source,
            )
            if device.name != coordinator:
                # Never returns: the end of the run cancels this program.
                await gather.serve_products(mailbox, coordinator, rows)
                return
            workers = names[1:]
            local_part = gather.RowCoordinator(mailbox, workers, rows, weight_source)
            # Workers receive the inputs of each product, and no message for a whole forward pass.
            await self._serve_requests(
                context,
                mailbox,
                receivers=(),
                local_part=local_part,
                weight_source=weight_source,
            )

    async def _reduce_shards(
        self, device: Device, context: GenerateContext[ShardsOptions, GenerationDetails]
    ) -> None:
        # Imported here, since only devices need torch.
        from testbed_generation.collectives import make_all_reduce
        from testbed_generation.programs import open_weight_source
        from testbed_generation.tensor_parallel import KINDS, ShardServer
        from testbed_generation.transport import Transport

        problem, options = context.problem, context.problem.options
        names = [spec.name for spec in problem.devices]
        weight_source = open_weight_source(context)
        async with Mailbox(device, problem.links, KINDS) as mailbox:
            transport = Transport(options.transport)
            shards = make_shards(problem, options.shares)
            server = ShardServer(
                mailbox,
                model=problem.model,
                shard=shards[names.index(device.name)],
                weight_source=weight_source,
                all_reduce=make_all_reduce(options.reduce, mailbox, names, transport),
            )
            if device.name != context.plan.coordinator:
                # Never returns: the end of the run cancels this program.
                await server.serve_forwards()
                return
            await self._serve_requests(
                context,
                mailbox,
                receivers=names[1:],
                local_part=server,
                weight_source=weight_source,
            )

    async def _serve_requests(
        self,
        context: GenerateContext[ShardsOptions, GenerationDetails],
        mailbox: Mailbox,
        *,
        receivers: Sequence[str],
        local_part: LocalPart,
        weight_source: WeightSource | None,
    ) -> None:
        """Serve the requests on the coordinator; ``receivers`` are the devices that receive each forward pass."""
        # Imported here, since only devices need torch.
        from testbed_generation.decoding import Embedder, serve_requests
        from testbed_generation.programs import (
            make_sampling,
            make_service,
            read_embedding,
        )
        from testbed_generation.tensor_parallel import TensorParallelDecoder

        problem = context.problem
        decoder = TensorParallelDecoder(
            mailbox,
            model=problem.model,
            receivers=receivers,
            local_part=local_part,
            embedder=Embedder(mailbox, problem.model, read_embedding(weight_source)),
            sampling=make_sampling(problem),
            weight_source=weight_source,
        )
        service = make_service(mailbox.device, context)
        await serve_requests(mailbox.device, decoder, service)
