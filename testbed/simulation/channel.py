"""The connection from one device to another: a queue at the sender's link, the link, and acknowledgements back.

A message in this queue is a `Parcel`. A parcel starts to leave when the previous parcel has left, unless `WINDOW` bytes
are unacknowledged by then. Methods with "launch" in their name schedule this transmission and the arrival. Broadcasts
(`Cast`) do not wait in the queue.
"""

from __future__ import annotations

import math
from asyncio import Future
from dataclasses import dataclass
from functools import partial

from testbed.hardware import largest_message
from testbed.network.broadcast import is_received, received_part
from testbed.network.link import Link
from testbed.simulation.crossing import (
    PACKET,
    Crossing,
    is_passable,
    is_random_link,
    make_crossing,
)
from testbed.simulation.event_queue import EventQueue
from testbed.simulation.host import Guest, Host
from testbed.simulation.reno import TIMEOUT_MARGIN, Window
from testbed.trace.log import Form
from testbed.wire.framing import WINDOW, chunks, wire_bytes
from testbed.wire.message import Message

SEND: Form = (
    "send",
    ("peer", "message", "bytes", "start", "duration", "queued", "encode"),
)
"""Name and fields of the event of an acknowledged message."""
STALL_SECONDS = 2.0
"""Seconds without an acknowledgement after which the sender reconnects, as in the agent."""
CONNECT_SECONDS = 1.0
"""Seconds between connection attempts over a silent link: the kernel repeats a lost SYN after a second."""
REFUSED_SECONDS = 0.25
"""Seconds between attempts to reach a stopped device or program, as in the agent."""


def next_attempt(since: float, now: float, round_trip: float) -> float:
    """Return the time of TCP's next retransmission at or after ``now``, for data lost since ``since``.

    The time-out doubles, and the connection is given up after `STALL_SECONDS`: a healed link is not found at once.

    >>> next_attempt(since=0.0, now=1.0, round_trip=0.05)
    1.75
    """
    timeout = TIMEOUT_MARGIN + round_trip
    attempt = since + timeout
    while attempt < now and attempt - since < STALL_SECONDS:
        timeout *= 2
        attempt += timeout
    if attempt >= now and attempt - since < STALL_SECONDS:
        return attempt
    reconnect = since + STALL_SECONDS
    attempts = max(0, math.ceil((now - reconnect) / CONNECT_SECONDS))
    return reconnect + attempts * CONNECT_SECONDS


class Parcel:
    """A message waiting for transmission or in transit, until acknowledged."""

    __slots__ = (
        "acknowledgement_delay",
        "arrival",
        "call_time",
        "channel",
        "end",
        "first_start",
        "future",
        "message",
        "remaining",
        "sender",
        "size",
        "start",
    )

    def __init__(
        self,
        channel: Channel,
        sender: Guest,
        message: Message,
        size: int,
        call_time: float,
        future: Future[None],
    ) -> None:
        self.channel = channel
        self.sender = sender
        """The program, from one boot to the next, that sends the message."""
        self.message = message
        self.size = size
        """Size of the message, without framing."""
        self.call_time = call_time
        """Time of the call of ``send``."""
        self.future = future
        """Done with the acknowledgement; cancelled if the sender gives up."""
        self.remaining = wire_bytes(size)
        """Bytes on the wire still to leave the sender."""
        self.first_start = -1.0
        """Time when the first byte first left; negative before."""
        self.start = -1.0
        """Start of the current transmission, which begins with the first byte that had not left before."""
        self.end = -1.0
        """Time when the last byte leaves."""
        self.arrival = -1.0
        """Time when the last byte arrives; negative while the message waits for a transmission."""
        self.acknowledgement_delay = 0.0
        """Random extra delay of the acknowledgement, in seconds."""


@dataclass(frozen=True, slots=True)
class Cast:
    """One transmission to several devices."""

    message: Message
    header: int
    """Bytes of the message before the values of its tensors."""
    size: int
    """Bytes of the whole message, without framing."""
    number: int
    """Number of the broadcast since the sender's boot."""
    start: float
    """Time when the first datagram had left."""


class Channel:
    """All messages in transit from one host to another.

    A transmission starts when the link is free and the window has room. Its duration follows from the rate, and the
    message arrives one delay after its end; the acknowledgement takes the delay of the return link. Both directions
    keep the order. Random loss and delay are drawn at the start of a transmission (`testbed.simulation.crossing`).
    Bytes that have left the sender when a link goes down or slows down still arrive; all others wait, and are sent
    again at TCP's next attempt.
    """

    def __init__(
        self, event_queue: EventQueue, source: Host, target: Host, link: Link, seed: int
    ) -> None:
        # The properties of the two links are copied here, since every message reads them.
        self._event_queue = event_queue
        self.target = target
        self._free_at = 0.0
        """Time when the last transmission scheduled so far ends."""
        self._last_arrival = 0.0
        """Time when the last message scheduled so far arrives; later messages arrive no earlier."""
        self._last_acknowledgement = 0.0
        """Time when the last acknowledgement scheduled so far arrives."""
        self._unacknowledged = 0
        """Unacknowledged bytes of the current program at the source."""
        # A list, since an empty deque takes 0.7 kB, and a mesh has a million channels.
        self._waiting: list[Parcel] = []
        """Parcels that have not arrived, in the order of the calls; parcels in transit come first."""
        self._blocked_since: float | None = None
        """Time since which a message waits for the channel to open; None if none waits."""
        self._is_random = False
        """Whether either direction has random behaviour."""
        self._passes_acknowledgements = True
        """Whether the link back lets acknowledgements of this channel's messages through."""
        self._waits_for_window = False
        """Whether a message waits for room in the window."""
        self.source = source
        self.link = link
        self.max_message_size = largest_message(source.spec, target.spec)
        """Maximum message size in bytes that both ends can hold."""
        self.back: Channel
        """The channel of the other direction, set by `connect`."""
        self._seed = seed
        self._link_count = 0
        """Number of links that the channel has had so far, including the present one; part of the random seed."""
        self.crossing: Crossing | None = None
        """Random processes of the link; None for a deterministic link."""
        self._window: Window | None = None
        """TCP window of the connection; None before the first random transmission."""
        self._is_open = self._is_passable()
        """Whether messages can leave: the link lets packets through, the target is on and the source runs."""
        self._target_was_off = target.device is None
        """Whether the target was off at any time since the channel was last open."""
        self._held_parcels: list[Parcel] = []
        """Messages that arrived at a paused target."""
        self._blocked_acknowledgements: list[tuple[float, Parcel]] = []
        """Delivery times of messages whose acknowledgement is blocked on the way back."""

    @staticmethod
    def connect(one: Channel, other: Channel) -> None:
        """Pair two channels as each other's return path."""
        one.back, other.back = other, one
        one._apply_link()
        other._apply_link()

    def _apply_link(self) -> None:
        """Restart the random processes of the link and update the return path."""
        link, back = self.link, self.back
        self._link_count += 1
        self.crossing = None
        if is_random_link(link):
            # A new random sequence for each change: the number of earlier draws must not matter.
            ends = f"{self.source.name} {self.target.name}"
            seed = f"{self._seed} {ends} {self._link_count}"
            self.crossing = make_crossing(link, seed)
        is_random = self.crossing is not None or back.crossing is not None
        self._is_random = is_random
        back._is_random = is_random
        back._passes_acknowledgements = is_passable(link)

    def _is_passable(self) -> bool:
        return self._is_reachable() and not self.source.paused

    def _is_reachable(self) -> bool:
        return is_passable(self.link) and self.target.device is not None

    def awaits_acknowledgement(self, device: Guest) -> bool:
        """Return whether the device has an unacknowledged message."""
        parcels = [*self._waiting, *self._held_parcels]
        parcels += [parcel for _, parcel in self._blocked_acknowledgements]
        own_parcels = [parcel for parcel in parcels if parcel.sender is device]
        return not all(parcel.future.done() for parcel in own_parcels)

    def has_partial_arrival(self) -> bool:
        """Return whether a message has arrived in part."""
        now, delay = self._event_queue.now, self.link.delay
        return any(
            parcel.arrival >= 0 and parcel.start + delay <= now
            for parcel in self._waiting
        )

    def enqueue(self, parcel: Parcel) -> None:
        """Queue a message behind the previous ones."""
        self._waiting.append(parcel)
        if self._is_open:
            if self._unacknowledged < WINDOW:
                self._launch_parcel(parcel)
            else:
                self._waits_for_window = True
        elif self._blocked_since is None and not self._is_reachable():
            self._blocked_since = parcel.call_time

    def _launch_parcel(self, parcel: Parcel) -> None:
        # Comparisons instead of max(), which takes most of the time here.
        start = self._free_at
        if start < self._event_queue.now:
            start = self._event_queue.now
        self._unacknowledged += parcel.size
        wire, min_seconds, lag = parcel.remaining, 0.0, 0.0
        if self._is_random:
            wire, min_seconds, lag, parcel.acknowledgement_delay = self._draw_crossing(
                wire
            )
        end = start + self.link.transmission_time(wire)
        # Over a link that loses packets, TCP's window may take longer than the rate.
        if end < start + min_seconds:
            end = start + min_seconds
        if parcel.first_start < 0:
            parcel.first_start = start
        parcel.start = start
        parcel.end = self._free_at = end
        arrival = end + (self.link.delay + lag)
        # TCP delivers in order: a message waits for earlier ones that were delayed by chance.
        if arrival < self._last_arrival:
            arrival = self._last_arrival
        self._last_arrival = parcel.arrival = arrival
        self._event_queue.at(arrival, _on_arrival, parcel)

    def _launch_waiting(self) -> None:
        """Launch queued messages within the window."""
        self._waits_for_window = False
        for parcel in self._waiting:
            if parcel.arrival < 0:
                if self._unacknowledged >= WINDOW:
                    self._waits_for_window = True
                    return
                self._launch_parcel(parcel)

    def _mark_for_relaunch(self, parcel: Parcel) -> None:
        """Mark a launched message for another launch."""
        parcel.arrival = -1.0
        # Bytes of an earlier boot do not count against the window of the present program.
        if parcel.sender is self.source.device:
            self._unacknowledged -= parcel.size

    def _draw_crossing(self, wire: float) -> tuple[float, float, float, float]:
        """Draw a transmission: total bytes sent, minimum duration, and the delays of message and acknowledgement."""
        min_seconds, lag, acknowledgement_delay = 0.0, 0.0, 0.0
        back = self.back.crossing
        if self.crossing is not None:
            if self._window is None:
                self._window = Window()
            draw_acknowledgement_loss = (
                _keep_acknowledgement if back is None else back.draw_loss
            )
            spacing = self.link.transmission_time(PACKET)
            wire, min_seconds, lag = self.crossing.draw_message(
                wire, spacing, self.round_trip, self._window, draw_acknowledgement_loss
            )
        if back is not None:
            acknowledgement_delay = back.draw_acknowledgement(self.round_trip)
        return wire, min_seconds, lag, acknowledgement_delay

    @property
    def round_trip(self) -> float:
        """Return the sum of both one-way delays."""
        return self.link.delay + self.back.link.delay

    def arrive(self, parcel: Parcel) -> None:
        """Deliver a message."""
        # An interrupted message arrives at another time or never; its entry in the event queue is void.
        if parcel.arrival != self._event_queue.now:
            return
        parcel.arrival = -1.0
        # Messages arrive in the order of the list.
        del self._waiting[0]
        self._blocked_since = None
        if self.target.paused:
            self._held_parcels.append(parcel)
            self.target.deferred_calls.append((self._deliver_held, parcel))
        else:
            self._deliver_parcel(parcel)

    def _deliver_held(self, parcel: Parcel) -> None:
        self._held_parcels.remove(parcel)
        self._deliver_parcel(parcel)

    def _deliver_parcel(self, parcel: Parcel) -> None:
        """Deliver a message to the device and send the acknowledgement."""
        now, device = self._event_queue.now, self.target.device
        assert device is not None
        start = parcel.first_start + self.link.delay
        # Reordered packets skip the delay.
        if start > now:
            start = now
        if self._passes_acknowledgements:
            self._send_acknowledgement(
                parcel, now + (self.back.link.delay + parcel.acknowledgement_delay)
            )
        else:
            self._blocked_acknowledgements.append((now, parcel))
        device.deliver(parcel.message, parcel.size, start, now - start)

    def _send_acknowledgement(self, parcel: Parcel, when: float) -> None:
        if when < self._last_acknowledgement:
            when = self._last_acknowledgement
        self._last_acknowledgement = when
        self._event_queue.at(when, _on_acknowledgement, parcel)

    def acknowledge(self, parcel: Parcel) -> None:
        """Process an acknowledgement at the sender."""
        source = self.source
        if source.paused:
            source.deferred_calls.append((_on_acknowledgement, parcel))
            return
        # The sender was switched off meanwhile.
        if parcel.sender is not source.device:
            return
        self._unacknowledged -= parcel.size
        if self._waits_for_window and self._is_open:
            self._launch_waiting()
        if parcel.future.done():
            return
        parcel.future.set_result(None)
        now, call_time = self._event_queue.now, parcel.call_time
        queued = parcel.first_start - call_time
        # The last value is 0: encoding takes none of the device's time.
        row = (
            now,
            source.name,
            self.target.name,
            parcel.message.kind,
            parcel.size,
            call_time,
            now - call_time,
            queued,
            0.0,
        )
        # Last, since a fault that waits for this event strikes within the call.
        parcel.sender.add(SEND, row)

    def withdraw(self, parcel: Parcel) -> None:
        """Remove a message unless all bytes have left; later messages move up."""
        has_left = parcel.arrival >= 0 and parcel.end <= self._event_queue.now
        if has_left or parcel not in self._waiting:
            return
        self._interrupt_sending()
        self._waiting.remove(parcel)
        if not self._waiting:
            self._blocked_since = None
        if self._is_open:
            self._relaunch_from(self._event_queue.now)

    def refresh(self, link: Link | None = None) -> None:
        """Adapt to a changed link, or to a changed state of a host."""
        now, was_open = self._event_queue.now, self._is_open
        if was_open:
            self._interrupt_sending()
        if link is not None:
            self.link = link
            self._apply_link()
        if self.target.device is None:
            self._forget_connection()
        self._is_open = self._is_passable()
        if not self._is_open:
            # A pause of the sender blocks nothing: its own clock stands still.
            is_blocked = self._blocked_since is not None or self._is_reachable()
            if not is_blocked and any(parcel.arrival < 0 for parcel in self._waiting):
                self._blocked_since = now
            return
        self._relaunch_from(now if was_open else self._reopens_at(now))
        self.back._send_blocked_acknowledgements()

    def _interrupt_sending(self) -> None:
        """Stop unfinished transmissions and record their progress."""
        now = self._event_queue.now
        self._last_arrival = 0.0
        for parcel in self._waiting:
            if parcel.arrival < 0:
                continue
            # A message that has left completely arrives as scheduled.
            if parcel.end <= now:
                self._last_arrival = parcel.arrival
                continue
            if parcel.start < now:
                # The part that has left is not sent again.
                parcel.remaining *= (parcel.end - now) / (parcel.end - parcel.start)
                self._blocked_since = None
            elif parcel.first_start == parcel.start:
                # Its first byte has not left after all.
                parcel.first_start = -1.0
            # Drawn again with the next transmission.
            parcel.acknowledgement_delay = 0.0
            self._mark_for_relaunch(parcel)

    def _forget_connection(self) -> None:
        """Requeue all unacknowledged messages after a restart of the target."""
        self._target_was_off = True
        self._window = None
        arrived = [
            *(parcel for _, parcel in self._blocked_acknowledgements),
            *self._held_parcels,
        ]
        in_transit = [parcel for parcel in self._waiting if parcel.arrival >= 0]
        self._blocked_acknowledgements.clear()
        self._held_parcels.clear()
        for parcel in (*arrived, *in_transit):
            self._mark_for_relaunch(parcel)
        pending = (*arrived, *self._waiting)
        self._waiting = [parcel for parcel in pending if not parcel.future.done()]
        for parcel in self._waiting:
            parcel.remaining = wire_bytes(parcel.size)

    def _reopens_at(self, now: float) -> float:
        """Return the time at which the sender notices the open channel."""
        since, refused = self._blocked_since, self._target_was_off
        self._target_was_off = False
        if since is None or since == now:
            return now
        # A stopped target refuses connections at once, so attempts follow each other soon.
        if refused:
            attempts = math.ceil((now - since) / REFUSED_SECONDS)
            return since + attempts * REFUSED_SECONDS
        attempt = next_attempt(since, now, self.round_trip)
        # Over a new connection, messages are sent again from their first byte.
        if attempt - since >= STALL_SECONDS:
            for parcel in self._waiting:
                if parcel.arrival < 0:
                    parcel.remaining = wire_bytes(parcel.size)
        return attempt

    def _relaunch_from(self, start: float) -> None:
        self._free_at = start
        self._launch_waiting()

    def _send_blocked_acknowledgements(self) -> None:
        """Send the acknowledgements blocked so far; the sender's next attempt reveals them."""
        now, blocked = self._event_queue.now, self._blocked_acknowledgements
        self._blocked_acknowledgements = []
        for since, parcel in blocked:
            attempt = next_attempt(since, now, self.round_trip)
            self._send_acknowledgement(parcel, attempt + self.round_trip)

    def abandon(self) -> None:
        """Discard unsent messages of a stopped sender. Bytes in transit still arrive."""
        self._interrupt_sending()
        # A paused sender that is killed is paused no more.
        self._is_open = self._is_passable()
        self._waiting = [parcel for parcel in self._waiting if parcel.arrival >= 0]
        self._blocked_since = None
        self._free_at = self._event_queue.now
        self._unacknowledged = 0

    def draw_cast_delay(self, cast: Cast) -> float | None:
        """Draw the delay of a broadcast in seconds, at the end of the transmission; None if lost."""
        delay = self.link.delay
        if self.crossing is not None:
            pieces = range(chunks(cast.size))
            # A sum instead of any(), so that the number of draws does not depend on the fates of the first datagrams.
            if sum(self.crossing.draw_loss() for _ in pieces):
                return None
            delay = max(self.crossing.draw_delay() for _ in pieces)
        return delay if self.link.up else None

    def deliver_cast(self, cast: Cast, delay: float) -> None:
        """Deliver a broadcast to the target, subject to random loss."""
        if self.target.paused:
            self.target.deferred_calls.append((deliver_casts, ([self], cast, delay)))
            return
        device, link = self.target.device, self.link
        if device is None:
            return
        ends = (self.source.name, self.target.name)
        is_heard = partial(
            is_received, self._seed, *ends, cast.number, link.message_loss
        )
        message = received_part(cast.message, cast.header, link.frame, is_heard)
        if message is None:
            return
        # A copy for each receiver, whose values are copied when one of the copies is changed.
        copied = {
            name: tensor._lazy_clone() for name, tensor in message.tensors.items()
        }
        # Not `replace`, which takes longer than all else here.
        copy = Message(
            message.kind,
            message.fields,
            copied,
            message.sender,
            message.padding,
            message.missing,
        )
        start = cast.start + delay
        now = self._event_queue.now
        device.deliver(copy, cast.size, start, now - start, cast.number)


def _keep_acknowledgement() -> bool:
    """Return False, as an acknowledgement over a lossless link is never lost."""
    return False


def _on_arrival(parcel: Parcel) -> None:
    parcel.channel.arrive(parcel)


def _on_acknowledgement(parcel: Parcel) -> None:
    parcel.channel.acknowledge(parcel)


def deliver_casts(arriving: tuple[list[Channel], Cast, float]) -> None:
    """Deliver a broadcast to the targets of several channels, at each delay in seconds."""
    channels, cast, delay = arriving
    for channel in channels:
        channel.deliver_cast(cast, delay)
