"""A channel between two devices that shares a rate with other channels: an uplink, a downlink or a radio cell."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from testbed.network.link import Link
from testbed.simulation.channel import Channel, Parcel
from testbed.simulation.event_queue import EventQueue
from testbed.simulation.host import Host
from testbed.simulation.sharing import Shared, SharedTransfer, Sharing
from testbed.wire.framing import WINDOW


class SharedChannel(Channel):
    """A channel with one transmission at a time, whose duration depends on concurrent transmissions.

    In contrast to `Channel`, at most one message is scheduled, because its end depends on other transmissions.
    """

    def __init__(
        self,
        event_queue: EventQueue,
        source: Host,
        target: Host,
        link: Link,
        seed: int,
        sharing: Sharing,
        shared_rates: Sequence[Shared],
        cell: Shared | None,
    ) -> None:
        super().__init__(event_queue, source, target, link, seed)
        self._sharing = sharing
        self._shared_rates = shared_rates
        """Rates of the source's uplink and of the target's downlink, each only if limited."""
        self._cell = cell
        self._current_parcel: Parcel | None = None
        """The only scheduled message: in transmission, or waiting for its start."""
        self._transfer: SharedTransfer | None = None
        """The transmission of the current message; None before its start."""
        self._lag = 0.0
        """Random lateness of the current message's arrival, in seconds."""

    def _launch_parcel(self, parcel: Parcel) -> None:
        # The next message starts when the current one has left: see `_finish_leaving`.
        if self._current_parcel is not None:
            return
        self._current_parcel = parcel
        self._unacknowledged += parcel.size
        start = max(self._free_at, self._event_queue.now)
        if parcel.first_start < 0:
            parcel.first_start = start
        # The end is unknown, since it depends on transmissions that begin meanwhile.
        parcel.start, parcel.end, parcel.arrival = start, inf, inf
        self._event_queue.at(start, self._start_leaving, (parcel, start))

    def _launch_waiting(self) -> None:
        self._waits_for_window = False
        if self._current_parcel is not None:
            return
        for parcel in self._waiting:
            if parcel.arrival < 0:
                self._waits_for_window = self._unacknowledged >= WINDOW
                if not self._waits_for_window:
                    self._launch_parcel(parcel)
                return

    def _start_leaving(self, leaving: tuple[Parcel, float]) -> None:
        parcel, start = leaving
        # An entry of the event queue cannot be cancelled: it is void if the message was interrupted before its start.
        is_current = parcel is self._current_parcel and self._transfer is None
        if not is_current or parcel.start != start:
            return
        wire, min_seconds, self._lag = parcel.remaining, 0.0, 0.0
        if self._is_random:
            wire, min_seconds, self._lag, parcel.acknowledgement_delay = (
                self._draw_crossing(wire)
            )
        cap = inf if self.link.rate is None else self.link.rate
        uses = [(shared, 1.0) for shared in self._shared_rates]
        if self._cell is not None:
            # A bit of a slow link occupies the radio channel for longer than a bit at the channel's rate.
            uses.append((self._cell, max(1.0, self._cell.rate / cap)))
        if min_seconds:
            # TCP's window, not the link, sets the pace.
            cap = min(cap, wire * 8 / min_seconds)
        self._transfer = SharedTransfer(wire * 8, cap, uses, self._finish_leaving)
        self._sharing.begin(self._transfer)

    def _finish_leaving(self) -> None:
        parcel, now = self._current_parcel, self._event_queue.now
        assert parcel is not None
        self._current_parcel = self._transfer = None
        parcel.end = now
        arrival = max(now + (self.link.delay + self._lag), self._last_arrival)
        self._last_arrival = parcel.arrival = arrival
        self._event_queue.at(arrival, self.arrive, parcel)
        self._launch_waiting()

    def _interrupt_sending(self) -> None:
        parcel, transfer = self._current_parcel, self._transfer
        if parcel is not None:
            self._current_parcel = self._transfer = None
            # The part of the message that has not left, from 0 to 1.
            remaining_share = 1.0
            if transfer is not None:
                remaining_share = self._sharing.stop(transfer) / transfer.total_bits
            if remaining_share < 1:
                parcel.remaining *= remaining_share
                self._blocked_since = None
            elif parcel.first_start == parcel.start:
                parcel.first_start = -1.0
            parcel.start = parcel.end = -1.0
            parcel.acknowledgement_delay = 0.0
            self._mark_for_relaunch(parcel)
        super()._interrupt_sending()
