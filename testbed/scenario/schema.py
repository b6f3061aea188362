"""The scenario file as pydantic models: every key, its meaning and its default.

Only the shape of the file is checked here. What needs a look at several keys at once (a link to a device
that is not there, more stages than units) is checked where the experiment is built from it.
"""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from testbed.network.link import Distribution
from testbed.scenario.quantities import Duration, Fraction, Rate, Size, Speed
from testbed.scenario.source import Key, Source

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")]


class Part(BaseModel):
    """Base of every part of a scenario: unknown keys are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)


class DevicePart(Part):
    """One device, or ``count`` alike ones named ``<name>1`` ... ``<name>N``."""

    profile: str = Field("laptop", description="one of `testbed profiles`")
    count: int | None = Field(None, ge=1, le=1000, description="so many, named <name>1 to <name>N")
    speed: Speed | None = Field(None, gt=0, description="overrides the profile's speed")
    memory: Size | None = Field(None, gt=0, description="overrides the profile's memory")
    cpus: float | None = Field(None, gt=0, description="CFS quota, for workloads that do not pace themselves")
    slowdown: float | None = Field(
        None,
        ge=1,
        description="pace by the host: take so many times what it needs. `speed` must say what plans and the simulator "
        "reckon with",
    )
    uplink: Rate | None = Field(None, description="of all that the device sends, beside the rates of its links")
    downlink: Rate | None = Field(None, description="of all that the device receives, beside the rates of its links")


class BurstsPart(Part):
    """Loss in bursts after Gilbert and Elliott: a link is in a good or a bad state, and moves before each packet."""

    p: Fraction = Field(description="probability of going from good to bad")
    r: Fraction = Field(description="probability of going from bad to good; 1/r is the mean length of a burst")
    bad_loss: Fraction = Field(1.0, description="lost in the bad state (1-h)", json_schema_extra={"default": "100%"})
    good_loss: Fraction = Field(0.0, description="lost in the good state (1-k)")


class LinkPart(Part):
    """The properties of a link, one direction. What is not given stays as the level above says."""

    preset: str | None = Field(None, description="a named set of figures, e.g. 4g; other keys override it")
    rate: Rate | None = Field(None, description="on the wire, Ethernet frames; default: as fast as the host")
    delay: Duration | None = Field(None, description="one-way")
    jitter: Duration | None = Field(None, description="standard deviation of the delay")
    distribution: Distribution | None = Field(None, description="of the jitter; default: normal")
    jitter_correlation: Fraction | None = Field(None, description="of successive packets' delays")
    loss: Fraction | None = Field(None, description="each packet independently")
    loss_correlation: Fraction | None = Field(None, description="of successive packets' fates")
    bursts: BurstsPart | None = Field(None, description="loss in bursts, instead of `loss`")
    message_loss: Fraction | None = Field(
        None, description="of broadcast messages, each lost whole, by each receiver for itself"
    )
    duplicate: Fraction | None = Field(None, description="packets that arrive twice")
    reorder: Fraction | None = Field(None, description="packets that skip the delay, and so overtake others")
    corrupt: Fraction | None = Field(None, description="packets in which one bit is wrong")
    limit: int | None = Field(
        None, description="packets that the queue before the rate holds; default: from rate times delay"
    )


class PairLinkPart(LinkPart):
    """A link that differs from the default: ``from``/``to`` for one direction, ``between`` for both."""

    from_: Name | None = Field(None, alias="from", description="sender, of one direction")
    to: Name | None = Field(None, description="receiver, of one direction")
    between: tuple[Name, Name] | None = Field(None, description="both directions between two devices")

    @model_validator(mode="after")
    def _one_way_of_naming(self) -> Self:
        if (self.between is None) == (self.from_ is None or self.to is None):
            raise ValueError("name the link either with 'from' and 'to' or with 'between: [a, b]'")
        return self

    def ends(self) -> list[tuple[Key, str]]:
        """Return each device named, with the key that names it."""
        if self.between is not None:
            return [(("between", index), name) for index, name in enumerate(self.between)]
        return [(("from",), str(self.from_)), (("to",), str(self.to))]

    def directions(self) -> list[tuple[str, str]]:
        """Return the (source, destination) pairs meant: one, or both of ``between``."""
        if self.between is not None:
            return [self.between, self.between[::-1]]
        return [(str(self.from_), str(self.to))]


class CellPart(Part):
    """A radio cell: what its devices send to each other shares one channel."""

    devices: tuple[Name, ...] = Field(
        (), description="its members; a name with a `count` stands for all of them; default: every device"
    )
    rate: Rate = Field(description="of the channel: of all transmissions in the cell together")


class NetworkPart(Part):
    """Which devices are linked, and how."""

    topology: Literal["mesh", "star", "line", "explicit"] = Field(
        "mesh",
        description="mesh: all to all; star: all to the first device; line: neighbours in the order of the file; "
        "explicit: what `links` lists. Devices without a link cannot talk, nobody forwards",
    )
    link: LinkPart = Field(default_factory=lambda: LinkPart(), description="every link, unless overridden")
    links: tuple[PairLinkPart, ...] = Field((), description="links that differ; later ones win")
    cells: tuple[CellPart, ...] = Field((), description="radio cells: devices that share one channel")
    subnet: str = Field("198.18.0.0/15", description="range from which the data network takes its addresses")

    @field_validator("subnet")
    @classmethod
    def _is_a_subnet(cls, value: str) -> str:
        try:
            return str(IPv4Network(value))
        except ValueError as error:
            raise ValueError(
                f"'{value}' is not a range of addresses ({error}): write one such as 10.20.0.0/16"
            ) from None


class ModelPart(Part):
    """A neural network by name, with its options (see `testbed models`)."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = Field(description="one of `testbed models`; further keys are its options")
    weights: str | None = Field(
        None,
        description="file to read them from, relative to the scenario file: safetensors as a run leaves them, "
        "Darknet's for yolov2, or a scenario, which is simulated first; default: random, drawn from the seed",
    )

    def options(self) -> dict[str, Any]:
        """Return what the model's own options have to validate."""
        return dict(self.model_extra or {})


class DataPart(Part):
    """A data set by name (see `testbed data list`)."""

    name: str = Field("digits", description="one of `testbed data list`")
    folder: str | None = Field(
        None, description="where its files lie, relative to the scenario file; default: data/<name> where one works"
    )
    path: str | None = Field(None, description="for `image`: the picture's file, relative to the scenario file")
    train: int | None = Field(None, ge=1, description="use only so many training samples")
    test: int | None = Field(None, ge=1, description="use only so many test samples")


class OptimizerPart(Part):
    """Stochastic gradient descent."""

    learning_rate: float = Field(0.05, gt=0, description="of stochastic gradient descent")
    momentum: float = Field(0.0, ge=0, lt=1, description="share of the last update in the next")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty")


class MethodPart(Part):
    """A method by name, with its options (see `testbed methods`)."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = Field(description="one of `testbed methods`; further keys are its options")

    def options(self) -> dict[str, Any]:
        """Return what the method's own options model has to validate."""
        return dict(self.model_extra or {})


class WorkloadPart(Part):
    """What the devices do together, and for how long."""

    task: Literal["train", "infer"] = Field("train", description="what the devices do together")
    model: ModelPart = Field(description="the neural network")
    data: DataPart = Field(default_factory=lambda: DataPart(), description="what it learns or is asked")
    method: MethodPart = Field(description="how the work is split")
    optimizer: OptimizerPart = Field(default_factory=lambda: OptimizerPart(), description="of training")
    batch_size: int = Field(32, ge=1, description="samples of a training step or of a request")
    epochs: int | None = Field(None, ge=1, description="training: how often every sample is seen")
    steps: int | None = Field(None, ge=1, description="training: number of steps, instead of epochs")
    requests: int | None = Field(
        None,
        ge=1,
        description="inference: number of batches of test samples sent through, round and round; none: one pass",
    )

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        given = [key for key in ("epochs", "steps", "requests") if getattr(self, key) is not None]
        if self.task == "infer" and given not in ([], ["requests"]):
            raise ValueError("an inference workload is as long as its 'requests'")
        if self.task == "train" and (len(given) != 1 or given == ["requests"]):
            raise ValueError("a training workload needs exactly one of 'epochs' and 'steps'")
        return self


class TriggerPart(Part):
    """A moment of the training: 'when worker1 begins backward of batch 205'."""

    device: Name = Field(description="whose moment it is")
    begins: str | None = Field(None, description="name of a span, e.g. forward, backward, update")
    event: str | None = Field(None, description="name of a recorded event, e.g. recovery")
    batch: int | None = Field(None, ge=0, description="of this batch, counted from 0; default: the first to come")
    micro: int | None = Field(None, ge=0, description="of this micro-batch, counted from 0 in its batch")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.begins is None) == (self.event is None):
            raise ValueError("say either what the device 'begins' or which 'event' it records")
        return self


class TargetPart(Part):
    """The links that a fault strikes: one pair, or all links of a device."""

    between: tuple[Name, Name] | None = Field(None, description="both directions between two devices")
    from_: Name | None = Field(None, alias="from", description="sender, of one direction")
    to: Name | None = Field(None, description="receiver, of one direction")
    device: Name | None = Field(None, description="every link from and to this device")

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        named = [self.between is not None, self.from_ is not None and self.to is not None, self.device is not None]
        if sum(named) != 1:
            raise ValueError("name the links with one of 'between', 'from' and 'to', or 'device'")
        return self

    def touches(self, pair: tuple[str, str]) -> bool:
        """Return whether this directed link is among those meant."""
        if self.device is not None:
            return self.device in pair
        if self.between is not None:
            return pair in (self.between, self.between[::-1])
        return pair == (self.from_, self.to)

    def target(self) -> str:
        """Say which links are meant."""
        if self.between is not None:
            return " <-> ".join(self.between)
        return self.device or f"{self.from_} -> {self.to}"

    def named(self) -> list[tuple[Key, str]]:
        """Return every device named, with the key that names it."""
        single = (("from", self.from_), ("to", self.to), ("device", self.device))
        named: list[tuple[Key, str]] = [((key,), name) for key, name in single if name is not None]
        return [*named, *((("between", place), name) for place, name in enumerate(self.between or ()))]


class DegradePart(TargetPart, LinkPart):
    """The links to make worse, and their new figures."""


class FlapPart(TargetPart):
    """Links that go down and come up again, over and over."""

    down: Duration = Field(gt=0, description="so long they drop everything")
    up: Duration = Field(gt=0, description="so long they work again before they next go down")
    times: int | None = Field(None, ge=1, le=100_000, description="how often; default: until `for`, or the end")


class ThrottlePart(Part):
    """A device that computes more slowly than its own speed."""

    device: Name = Field(description="which one")
    speed: Speed | None = Field(None, gt=0, description="compute at this speed")
    slowdown: float | None = Field(None, ge=1, le=1e6, description="take so many times as long")

    @model_validator(mode="after")
    def _one_figure(self) -> Self:
        if (self.speed is None) == (self.slowdown is None):
            raise ValueError("say how slow with exactly one of 'speed' and 'slowdown'")
        return self


class FaultPart(Part):
    """One thing that breaks or mends, and when.

    Exactly one action; at most one of ``at`` (seconds after the start of the workload), ``when`` (an event of
    the training) and ``after`` (seconds after the fault before it in the file).
    """

    kill: Name | None = Field(None, description="the device ends at once, its memory is lost")
    restart: Name | None = Field(None, description="a killed device boots again")
    pause: Name | None = Field(None, description="the device stands still, its memory is kept")
    resume: Name | None = Field(None, description="a paused device goes on")
    partition: tuple[tuple[Name, ...], ...] | None = Field(
        None, description="groups that cannot reach each other; devices not named form one more group"
    )
    degrade: DegradePart | None = Field(None, description="links take other figures")
    flap: FlapPart | None = Field(None, description="links go down and come up, over and over")
    heal: Literal["all"] | None = Field(None, description="undo every partition and degradation, end every flap")
    throttle: ThrottlePart | None = Field(None, description="a device computes more slowly, as when it is hot")
    unthrottle: Name | None = Field(None, description="a throttled device has its own speed again")
    at: Duration | None = Field(None, description="time since the start of the workload")
    when: TriggerPart | None = Field(None, description="a moment of the training")
    after: Duration | None = Field(None, description="time since the fault before it in the file struck")
    for_: Duration | None = Field(None, alias="for", description="undone after this time")

    ACTIONS: ClassVar[tuple[str, ...]] = (
        "kill",
        "restart",
        "pause",
        "resume",
        "partition",
        "degrade",
        "flap",
        "heal",
        "throttle",
        "unthrottle",
    )
    MENDING: ClassVar[tuple[str, ...]] = ("restart", "resume", "heal", "unthrottle")

    @property
    def action(self) -> str:
        """The name of the one action given."""
        return next(name for name in self.ACTIONS if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _one_action_one_time(self) -> Self:
        actions = [name for name in self.ACTIONS if getattr(self, name) is not None]
        if len(actions) != 1:
            raise ValueError("a fault has exactly one of " + ", ".join(self.ACTIONS))
        if sum(value is not None for value in (self.at, self.when, self.after)) != 1:
            raise ValueError("a fault strikes at exactly one of 'at', 'when' and 'after'")
        if self.for_ is not None and actions[0] in self.MENDING:
            raise ValueError(f"'{actions[0]}' mends something: it takes no 'for'")
        if self.for_ is not None and self.flap is not None and self.flap.times is not None:
            raise ValueError("a flap ends after 'times' or after 'for': give one of the two")
        return self


class PaperRow(Part):
    """One figure that a paper prints, and where it comes out here."""

    name: str = Field(description="what the row is called")
    figure: str = Field(
        description="a figure of metrics.json, as in `expect`; or `plan.` and a dotted key of plan.json's details"
    )
    at: dict[str, Any] = Field(
        default_factory=dict, description="which points of the sweep: swept key, or one inside it -> value"
    )
    over: dict[str, Any] | None = Field(
        None, description="divide by the same figure at these points, repetition by repetition"
    )
    over_figure: str | None = Field(None, description="divide by this other figure")
    value: str | float | None = Field(None, description="the paper's; a time or a size with its unit")
    expect: str | None = Field(None, description="condition on our mean, as in `expect`; decides the exit status")
    note: str = Field("", description="why the two differ, what to know")


class PaperSeries(Part):
    """One line or one kind of bars of a chart."""

    label: str = Field(description="what the legend calls it")
    at: dict[str, Any] = Field(
        default_factory=dict,
        description="which single run is drawn: a point of the sweep, as in `rows`; its first repetition",
    )
    rows: tuple[str, ...] = Field((), description="of `lines` and `bars`: names of rows, one for each of `x`")


class PaperChart(Part):
    """A chart over the runs, as a publication draws it."""

    title: str = Field(description="stands above it")
    what: Literal["steps", "loss", "accuracy", "lines", "bars"] = Field(
        description="of single runs: steps (the time of each), loss, or accuracy as it was evaluated; of rows, ours "
        "and the paper's: lines, bars"
    )
    over: Literal["steps", "seconds"] = Field("steps", description="what x is where single runs are drawn")

    @property
    def of_runs(self) -> bool:
        """Whether each line is a single run, instead of figures of rows."""
        return self.what in ("steps", "loss", "accuracy")

    x: tuple[float | str, ...] = Field(
        (), description="where the rows stand: rising numbers for `lines`, words below them for `bars`"
    )
    axis: str = Field("", description="what x is")
    range: tuple[float, float] | None = Field(None, description="first and last x, not of `bars`; default: all")
    series: tuple[PaperSeries, ...] = Field(min_length=1, max_length=6, description="its lines, or its kinds of bars")

    @field_validator("range")
    @classmethod
    def _rising(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not value[0] < value[1]:
            raise ValueError(f"ends where it begins or before: write [{value[1]:g}, {value[0]:g}] or a wider one")
        return value


class PaperPart(Part):
    """A table or a figure of a publication that the scenario reproduces."""

    source: str = Field(description="which one, as one would cite it")
    rows: tuple[PaperRow, ...] = Field(min_length=1, description="its figures")
    charts: tuple[PaperChart, ...] = Field((), description="its plots, drawn into paper.html")


class Scenario(Part):
    """A whole experiment in one file."""

    name: Name = Field(description="the runs are called after it")
    description: str = Field("", description="shown in the report")
    seed: int = Field(0, ge=0, description="everything random comes from it")
    devices: dict[Name, DevicePart] = Field(min_length=1, description="by name; the first is the source")
    network: NetworkPart = Field(default_factory=lambda: NetworkPart(), description="which devices are linked, and how")
    workload: WorkloadPart = Field(description="what the devices do together, and for how long")
    faults: tuple[FaultPart, ...] = Field((), description="what breaks and mends, and when")
    trace: str | tuple[str, ...] = Field(
        (),
        description="how links and speeds change over time: a CSV file, relative to the scenario file, or its lines, "
        "each `time,what,value`",
    )
    repetitions: int = Field(1, ge=1, description="runs of each point, each with its own seed")
    sweep: dict[str, tuple[Any, ...]] = Field(
        default_factory=dict, description="dotted key of this file -> values; all combinations run"
    )
    points: tuple[dict[str, Any], ...] = Field(
        (), description="further points beside the sweep's, each with its own dotted keys and values"
    )
    paper: PaperPart | None = Field(None, description="what a publication prints, to stand beside what comes out here")
    expect: dict[str, str] = Field(
        default_factory=dict, description="figure of metrics.json -> condition, e.g. accuracy: '>= 0.9'"
    )
    time_limit: Duration = Field(
        600.0, gt=0, description="the run fails when it is not over by then", json_schema_extra={"default": "10min"}
    )

    @field_validator("trace", mode="before")
    @classmethod
    def _file_or_lines(cls, value: object) -> object:
        lines = [value] if isinstance(value, str) else value
        if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
            raise ValueError("is neither the name of a CSV file nor a list of its lines, each as text")
        return value

    _source: Source = PrivateAttr(default_factory=lambda: Source("the scenario"))

    @property
    def source(self) -> Source:
        """Where each key was written; names no file for a scenario that came from none."""
        return self._source

    def located(self, source: Source) -> Self:
        """Return the same scenario, written there."""
        scenario = self.model_copy()
        scenario._source = source
        return scenario
