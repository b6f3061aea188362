"""The `network` section of a scenario: links, cells, radio, presets, and the rules by which one link overrides another.

`overlay` applies a section (`LinkPart`) to a link: first `network.link`, then entries of `network.links`, then faults
and link traces. A section overrides the properties that it sets, and all others keep their values.

A preset sets only properties that its source states. No source states a delay, so a preset has a delay only if its
source is an assumption; users write the delay beside the preset.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from ipaddress import IPv4Network
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from testbed.common.errors import Key
from testbed.common.part import ConfigModel, Name
from testbed.common.quantities import Duration, Fraction, Rate, Size
from testbed.network.link import Distribution, GilbertElliott, Link, Topology


class BurstsPart(ConfigModel):
    """Loss in bursts after Gilbert and Elliott: a link is in a good or a bad state, and moves before each packet."""

    p: Fraction = Field(
        description=(
            "probability of a change from the good to the bad state, before each packet"
        )
    )
    r: Fraction = Field(
        description=(
            "probability of a change from the bad to the good state; 1/r is the "
            "mean length of a burst in packets"
        )
    )
    bad_loss: Fraction = Field(
        1.0,
        description="loss probability in the bad state (1-h)",
        json_schema_extra={"default": "100%"},
    )
    good_loss: Fraction = Field(
        0.0, description="loss probability in the good state (1-k)"
    )


# RFC 1122: "this host on this network", which Python counts as private.
_THIS_HOST = IPv4Network("0.0.0.0/8")


class LinkPart(ConfigModel):
    """Properties of one direction of a link. Missing properties keep the values of the overridden link."""

    preset: str | None = Field(
        None,
        description="a named set of link properties, e.g. 4g; other keys override it",
    )
    rate: Rate | None = Field(
        None,
        description=(
            "rate on the wire, counted in Ethernet frames; default: as fast as the host"
        ),
    )
    delay: Duration | None = Field(None, description="one-way delay")
    jitter: Duration | None = Field(None, description="standard deviation of the delay")
    distribution: Distribution | None = Field(
        None, description="distribution of the jitter; default: normal"
    )
    jitter_correlation: Fraction | None = Field(
        None, description="correlation of the delays of successive packets"
    )
    loss: Fraction | None = Field(
        None, description="probability that a packet is lost, independently of others"
    )
    loss_correlation: Fraction | None = Field(
        None, description="correlation of the losses of successive packets"
    )
    bursts: BurstsPart | None = Field(
        None, description="burst losses (Gilbert-Elliott), instead of `loss`"
    )
    message_loss: Fraction | None = Field(
        None,
        description=(
            "probability that a receiver loses a broadcast message as a whole, "
            "independently of other receivers"
        ),
    )
    duplicate: Fraction | None = Field(
        None, description="probability that a packet arrives twice"
    )
    reorder: Fraction | None = Field(
        None,
        description="probability that a packet skips the delay and overtakes others",
    )
    corrupt: Fraction | None = Field(
        None, description="probability that a packet has one wrong bit"
    )
    limit: int | None = Field(
        None,
        description=(
            "capacity in packets of the queue before the rate limit; default: "
            "computed from rate and delay"
        ),
    )


class PairLinkPart(LinkPart):
    """A link with individual properties: ``from``/``to`` for one direction, ``between`` for both."""

    from_: Name | None = Field(
        None, alias="from", description="sender, for one direction"
    )
    to: Name | None = Field(None, description="receiver, for one direction")
    between: tuple[Name, Name] | None = Field(
        None, description="two devices, for both directions"
    )

    @model_validator(mode="after")
    def _check_ends(self) -> Self:
        if (self.between is None) == (self.from_ is None or self.to is None):
            raise ValueError(
                "name the link either with 'from' and 'to' or with 'between: [a, b]'"
            )
        return self

    def ends(self) -> list[tuple[Key, str]]:
        """Return the key in the section, and the name, of each of the two devices."""
        if self.between is not None:
            one, other = self.between
            return [(("between", 0), one), (("between", 1), other)]
        return [(("from",), str(self.from_)), (("to",), str(self.to))]

    def directions(self) -> list[tuple[str, str]]:
        """Return the pairs (source, destination): one for ``from`` and ``to``, two for ``between``."""
        if self.between is not None:
            return [self.between, self.between[::-1]]
        return [(str(self.from_), str(self.to))]


class CellPart(ConfigModel):
    """A radio cell: all transmissions between the member devices share one channel."""

    devices: tuple[Name, ...] = Field(
        (),
        description=(
            "member devices; a name with a `count` means all devices of the group; "
            "default: all devices"
        ),
    )
    rate: Rate = Field(
        description="rate of the channel, shared by all transmissions in the cell"
    )


class ReceptionReferencePart(ConfigModel):
    """The configuration for the mean reception ratio of a radio, if different from the run's configuration."""

    path_loss_exponent: float | None = Field(
        None, gt=0, description="path loss exponent; default: that of the run"
    )
    area: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] | None = (
        Field(
            None,
            description=(
                "width and height in metres; drawn positions are scaled to this area; "
                "default: that of the run"
            ),
        )
    )
    devices: tuple[Name, ...] = Field(
        (),
        description=(
            "names of at least two devices, which the run may lack: positions are "
            "drawn by name; default: those of the run"
        ),
    )


class RadioPart(ConfigModel):
    """Positions and radios of the devices, which determine the share of casts lost by each receiver."""

    area: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = Field(
        description=(
            "width and height in metres; positions of devices without a `position` "
            "are drawn from the seed"
        )
    )
    preset: str = Field(
        "802.11a",
        description=(
            "radio of `testbed show profiles`, which gives transmit power and "
            "sensitivity"
        ),
    )
    transmit_power: float | None = Field(
        None, description="transmit power in dBm; default: from the preset"
    )
    sensitivity: float | None = Field(
        None, description="minimum received power in dBm; default: from the preset"
    )
    path_loss_exponent: float = Field(
        3.1, gt=0, description="path loss exponent; 2 in free space, more indoors"
    )
    reference_loss: float = Field(
        46.68,
        gt=0,
        description="path loss in dB at 1 m; the default is free space at 5.15 GHz",
    )
    shadowing: float = Field(
        8.0,
        ge=0,
        description=(
            "standard deviation in dB of the shadowing, which is drawn for each "
            "transmission"
        ),
    )
    mean_reception: Fraction | None = Field(
        None,
        gt=0,
        lt=1,
        description=(
            "mean reception ratio of all pairs, from which the transmit power is "
            "computed; excludes `transmit_power`"
        ),
    )
    mean_reception_at: ReceptionReferencePart | None = Field(
        None,
        description=(
            "configuration with this mean reception ratio, so that runs with other "
            "exponents, areas or devices have the same transmit power; default: that "
            "of the run"
        ),
    )
    packets: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description=(
            "number of packets with which each reception ratio is measured; "
            "default: exact probabilities"
        ),
    )


class NetworkPart(ConfigModel):
    """The topology, and the properties of links, cells and radio."""

    topology: Topology = Field(
        "mesh",
        description="mesh: all to all; star: all to the first device; line: neighbours in the order of the file; "
        "explicit: the pairs in `links`. Devices without a link cannot communicate; messages are never forwarded",
    )
    link: LinkPart = Field(
        default_factory=lambda: LinkPart(),
        description="properties of all links, unless overridden",
    )
    links: tuple[PairLinkPart, ...] = Field(
        (),
        description="links with other properties; later entries override earlier ones",
    )
    cells: tuple[CellPart, ...] = Field(
        (), description="radio cells: devices that share one channel"
    )
    radio: RadioPart | None = Field(
        None,
        description=(
            "derives `message_loss` of each link from the distance; `links` can "
            "override single links"
        ),
    )
    frame: Size | None = Field(
        None,
        ge=16,
        description=(
            "frame size of casts: each frame is lost with probability "
            "`message_loss`, so casts can arrive in part; default: a cast is lost "
            "as a whole"
        ),
    )
    subnet: str = Field(
        "198.18.0.0/15",
        description="address range of the data network",
    )

    control_subnet: str | None = Field(
        None,
        description=(
            "address range of the network between controller and containers; "
            "default: 198.18.0.0/15, then the address pools of the engine"
        ),
    )

    @field_validator("subnet", "control_subnet")
    @classmethod
    def _check_subnet(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            network = IPv4Network(value)
        except ValueError as error:
            raise ValueError(
                f"'{value}' is not a range of addresses ({error}): write one such as 10.20.0.0/16"
            ) from None
        # During a run, the host could not reach the owners of a public range.
        is_unusable = (
            network.is_global
            or network.is_loopback
            or network.is_link_local
            or network.is_multicast
            or network.overlaps(_THIS_HOST)
        )
        if is_unusable:
            raise ValueError(
                f"'{value}' is not a private range: write one such as 10.20.0.0/16"
            )
        return str(network)


# Only faults change `up`, and `frame` is a key of the whole network.
_OTHER_FIELDS = ("up", "frame")
PROPERTIES = tuple(
    field.name for field in fields(Link) if field.name not in _OTHER_FIELDS
)
"""Fields of `Link` that are also keys of `LinkPart`, which has ``preset`` in addition."""


def explicit_properties(part: LinkPart) -> dict[str, Any]:
    """Return the properties set in a section, without the preset's properties, by field of `Link`."""
    values = {name: getattr(part, name) for name in PROPERTIES}
    properties = {name: value for name, value in values.items() if value is not None}
    if part.bursts is not None:
        properties["bursts"] = GilbertElliott(
            part.bursts.p, part.bursts.r, part.bursts.bad_loss, part.bursts.good_loss
        )
    return properties


def overlay(link: Link, part: LinkPart, is_from_first: bool) -> Link:
    """Return a link with the properties of a section: first the preset's properties, then the other keys.

    A loss replaces the bursts of the link, and bursts replace its loss. A jitter of 0 also removes distribution and
    correlation of the jitter, and a loss of 0 the correlation of losses. ``is_from_first`` states whether the link
    leads away from the first device of the scenario, which is a preset's down direction. Raises KeyError for an unknown
    preset.

    >>> overlay(Link(delay=0.01), LinkPart(preset="4g", loss="1%"), is_from_first=True)  # doctest: +ELLIPSIS
    Link(rate=25000000.0, delay=0.01, ..., loss=0.01, ...)
    """
    implied: dict[str, Any] = {}
    if part.preset is not None:
        preset = PRESETS[part.preset]
        implied["rate"] = preset.rate(is_from_first)
        if preset.delay is not None:
            implied["delay"] = preset.delay
    explicit = explicit_properties(part)
    # A property that remained from the link could contradict the new property, which `checks` would refuse.
    if "bursts" in explicit:
        implied |= {"loss": 0.0, "loss_correlation": 0.0}
    elif "loss" in explicit:
        implied["bursts"] = None
        if explicit["loss"] == 0:
            implied["loss_correlation"] = 0.0
    if explicit.get("jitter") == 0:
        implied |= {"distribution": "normal", "jitter_correlation": 0.0}
    return replace(link, **implied | explicit)


@dataclass(frozen=True)
class LinkPreset:
    """Properties of a type of access network, from a device's point of view."""

    name: str
    up: float
    """Rate in bit/s from a device to the first device of the scenario. Also the rate between two other devices, whose
    traffic passes the slower uplink first."""
    down: float
    """Rate in bit/s from the first device of the scenario to another device."""
    source: str
    """Standard or paper that states the rates."""
    delay: float | None = None
    """One-way delay in seconds; None if the source states no delay."""
    frame: int | None = None
    """Maximum frame size in bytes (including the header for 802.15.4). For information only."""

    def rate(self, is_from_first: bool) -> float:
        """Return the rate in bit/s of one direction: down from the first device, up from every other."""
        return self.down if is_from_first else self.up


_PIPELEARN = "PipeLearn (Zhang et al.), test platform: the first device is the server"

_PRESETS = (
    LinkPreset("ethernet-10", 10e6, 10e6, "IEEE 802.3, 10BASE-T"),
    LinkPreset("ethernet-100", 100e6, 100e6, "IEEE 802.3, 100BASE-TX"),
    LinkPreset("ethernet-1000", 1e9, 1e9, "IEEE 802.3, 1000BASE-T"),
    LinkPreset("4g", 10e6, 25e6, _PIPELEARN),
    LinkPreset("4g+", 20e6, 40e6, _PIPELEARN),
    LinkPreset("wifi", 50e6, 50e6, _PIPELEARN),
    LinkPreset(
        "802.15.4",
        250e3,
        250e3,
        "IEEE 802.15.4 at 2.4 GHz, as in EdgePipe (Yoon et al.), equation (4); aMaxPHYPacketSize",
        frame=127,
    ),
    LinkPreset(
        "802.11a",
        6e6,
        6e6,
        "IEEE 802.11a-1999, the lowest rate, which reaches farthest; longest MSDU",
        frame=2304,
    ),
    LinkPreset(
        "lan", 1e9, 1e9, "assumption: gigabit Ethernet through one switch", delay=0.1e-3
    ),
)

PRESETS = {preset.name: preset for preset in _PRESETS}
"""Link presets by their names in a scenario."""
