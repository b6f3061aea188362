"""TCP Reno as in Linux, simulated per round trip: when the packets of a message leave a lossy link.

Connections of real runs use Reno, too (`testbed.wire.framing.CONGESTION_CONTROL`). Receivers report all arrived packets
(SACK), and senders find losses as Linux does by default: by later packets, by time (RACK, RFC 8985), and by probes.

The simulation proceeds in rounds. A round sends as many packets as the window holds, and the next round follows one
round trip later. Without a loss the window grows: by the number of acknowledged packets until it reaches a threshold
(slow start), by one packet for each round afterwards. A loss begins a recovery: the window is halved once, and the lost
packets are repeated in the next rounds. If no later packet reveals the loss, the sender waits for a timer: a probe (one
packet more) after two round trips, or the retransmission time-out.
"""

from __future__ import annotations

import math
from collections.abc import Callable

# Constants of Linux 6 (`net/ipv4/tcp_recovery.c` and `tcp_output.c`).

TIMEOUT_MARGIN = 0.2
"""Seconds by which the first retransmission time-out exceeds the round trip (Linux's minimum)."""
FIRST_WINDOW = 10
"""Initial window in packets."""
_MIN_WINDOW = 2
"""Minimum congestion window in packets after a loss (RFC 5681)."""
_DELAYED_ACKNOWLEDGEMENT = 0.04
"""A receiver acknowledges every second packet at once, and a single one after this number of seconds."""
_TIMER_LATENESS = 0.005
"""Seconds by which short timers end late: the kernel adds 2 ms and rounds up to its tick of 4 ms, so 2 to 6 ms."""
_DUPLICATE_THRESHOLD = 3
"""Number of packets after a lost one whose arrival reveals the loss at once; with fewer, a timer decides."""
_REORDERING_SHARE = 1 / 4
"""Share of a round trip for which RACK waits, since a missing packet may only be late (RFC 8985, 6.2)."""
_QUEUED_PACKETS = 2
"""Packets that may wait before the link (TCP small queues), in addition to `_QUEUED_SECONDS`."""
_QUEUED_SECONDS = 0.001
"""Seconds of the link's rate whose packets may wait before the link (TCP small queues), besides `_QUEUED_PACKETS`."""

# A constant of the agent.

_MAX_TIMEOUT_MARGIN = 2.0
"""Seconds by which a repeated time-out exceeds the round trip at most: the agent reconnects after this silence."""

# Constants of the simulation.

_CERTAIN_ACKNOWLEDGEMENTS = 4
"""From this number of acknowledgements on, one is assumed to arrive: losing all is rare, and draws take time."""
_SPARE_ATTEMPTS = 10_000
"""Maximum number of attempts in addition to the number of packets; nothing is lost after these, so that every
message gets through. A round, a probe and a repetition after a time-out are one attempt each."""

Draw = Callable[[], bool]
"""Draws a fate: true if the next packet or acknowledgement is lost."""


def double_timeout(timeout: float, round_trip: float) -> float:
    """Return the next time-out after ``timeout`` seconds without an acknowledgement (RFC 6298, 5.5).

    Both time-outs include the round trip.
    """
    return min(2 * timeout, round_trip + _MAX_TIMEOUT_MARGIN)


class Window:
    """Congestion window in packets, kept from one message to the next."""

    __slots__ = ("size", "threshold")

    def __init__(self) -> None:
        self.size: int = FIRST_WINDOW
        self.threshold: float = math.inf
        """Size in packets from which a round adds only one packet."""

    def grow(self, acknowledged: int) -> None:
        """Grow if the acknowledged packets of a round show that the round used the window.

        Below the threshold, more than half of the window is enough (Linux, `tcp_is_cwnd_limited`); from the threshold
        on, `raise_by` requires the whole window.
        """
        if self.size >= self.threshold or self.size < 2 * acknowledged:
            self.raise_by(acknowledged)

    def raise_by(self, acknowledged: int) -> None:
        """Grow by the acknowledged packets of a round up to the threshold, then by one packet for a whole window."""
        if self.size < self.threshold:
            self.size = int(min(self.size + acknowledged, self.threshold))
        elif acknowledged >= self.size:
            self.size += 1

    def halve(self) -> None:
        """Halve the window after a loss, and set the threshold to the new size.

        After a time-out, `restart` follows, so that only the threshold keeps the half.
        """
        self.size = max(self.size // 2, _MIN_WINDOW)
        self.threshold = float(self.size)

    def restart(self) -> None:
        """Shrink to the minimum after a time-out, which begins a slow start."""
        # Linux begins with one packet (`tcp_enter_loss`), whose acknowledgement makes two.
        self.size = _MIN_WINDOW


class Transmission:
    """The transmission of one message's packets; `run` computes the public attributes."""

    __slots__ = (
        "_attempt_limit",
        "_attempts",
        "_draw_acknowledgement_loss",
        "_draw_loss",
        "_largest_round",
        "_missing",
        "_new_before_halving",
        "_now",
        "_recovering",
        "_recovery_budget",
        "_round_trip",
        "_spacing",
        "_timed_out",
        "_unnoticed",
        "_unsent",
        "_window",
        "last_departure",
        "last_round_size",
        "sending_seconds",
        "sent_packets",
    )

    def __init__(
        self,
        window: Window,
        packets: int,
        spacing: float,
        round_trip: float,
        draw_loss: Draw,
        draw_acknowledgement_loss: Draw,
    ) -> None:
        """Begin with all packets unsent.

        ``spacing`` is the time in which the link sends one packet, and ``round_trip`` the delay of the link plus the
        delay of the opposite link, in seconds.
        """
        self.sent_packets = 0
        """Number of sent packets, including repeated ones and probes."""
        self.sending_seconds = 0.0
        """Seconds until every packet had left for the first time."""
        self.last_departure = 0.0
        """Seconds until the packet that arrives last had left."""
        self.last_round_size = 0
        """Number of packets of the final round."""
        self._window = window
        self._unsent = packets
        """Number of unsent packets."""
        self._missing = 0
        """Number of packets that the sender knows to be lost and has not repeated."""
        self._unnoticed = 0
        """Number of lost packets at the end of the previous round, which only packets of the next round reveal."""
        self._spacing = spacing
        self._round_trip = round_trip
        self._draw_loss = draw_loss
        self._draw_acknowledgement_loss = draw_acknowledgement_loss
        self._now = 0.0
        """Seconds since the first packet began to leave."""
        self._recovering = False
        """Whether the next round repeats lost packets, so that Linux is in the state Recovery or Loss."""
        self._timed_out = False
        """Whether the current recovery has had a time-out, which is Linux's state Loss."""
        self._recovery_budget = 0
        """Number of packets in the next round if the round belongs to a recovery."""
        self._new_before_halving = 0
        """Number of new packets in the next round that leave before the sender learns of the loss; their loss does not
        halve the window again."""
        self._attempts = 0
        """Number of rounds, probes and repetitions after time-outs so far."""
        self._attempt_limit = packets + _SPARE_ATTEMPTS
        self._largest_round = packets
        """Maximum number of packets that leave in one round; further packets wait in the socket."""
        if spacing:
            on_the_way = round_trip / spacing
            self._largest_round = int(
                on_the_way + _QUEUED_PACKETS + _QUEUED_SECONDS / spacing
            )

    def run(self) -> None:
        """Send until everything has arrived."""
        while self._unsent or self._missing:
            self._send_round()
        # The final acknowledgement arrives one round trip after the packet has left. Subtracting the round trip again
        # may round to less than the sending time.
        self.last_departure = max(self._now - self._round_trip, self.sending_seconds)

    def _send_round(self) -> None:
        unnoticed = self._unnoticed
        self._unnoticed = 0
        window = self._recovery_budget
        if not self._recovering:
            # Unnoticed losses still count as packets on the way.
            window = min(self._window.size, self._largest_round) - unnoticed
        # Lost packets go first, as in Linux.
        repeated = min(self._missing, window)
        new = min(self._unsent, window - repeated)
        sent = repeated + new
        self._missing -= repeated
        self._unsent -= new
        # A fate is true for a lost packet.
        fates = [True] * unnoticed + self._draw_fates(sent)
        self.sent_packets += sent
        self.last_round_size = sent
        # The instant at which the last packet of the round has left.
        round_end = self._now + sent * self._spacing
        is_last_round = not self._unsent and not self._missing
        if new and not self._unsent:
            self.sending_seconds = round_end
        if not any(fates) and is_last_round:
            self._now = round_end + self._round_trip
            if self._timed_out:
                self._window.raise_by(sent)
            elif not self._recovering:
                self._window.grow(sent)
            return
        self._process_fates(fates, repeated, round_end)

    def _process_fates(
        self, fates: list[bool], repeated: int, round_end: float
    ) -> None:
        """Process the fates of a round with losses, or of a round followed by others.

        Unnoticed losses of the previous round come first in ``fates``. ``repeated`` is the number of repeated packets
        in the round, and ``round_end`` the instant at which its last packet has left.
        """
        judged = len(fates)
        lost = sum(fates)
        arrived = judged - lost
        before_gap = fates.index(True) if lost else judged
        # If only the last packets are lost, the receiver sees no gap and acknowledges every other packet.
        no_gap = before_gap == arrived
        acknowledgements = arrived // 2 if no_gap and not self._recovering else arrived
        is_acknowledged = self._draw_is_acknowledged(acknowledgements)
        if self._timed_out and is_acknowledged:
            # After a time-out, slow start begins while packets are still missing (RFC 5681, 3.1): of Linux's states,
            # only fast recovery and a reduction without loss (CWR) withhold slow start (`tcp_cong_control`).
            # Only packets before the gap raise the window (`tcp_may_raise_cwnd`).
            # Linux first sends new packets to test whether the time-out was a mistake (F-RTO), which is left out here.
            self._window.raise_by(before_gap)
        is_last_round = not self._unsent and not self._missing
        if not is_acknowledged or (lost and no_gap and is_last_round):
            self._missing += lost
            self._await_timer(round_end, judged, arrived, is_acknowledged, no_gap)
            return
        # The first acknowledgement begins the next round, but not before all packets of this round have left.
        first_acknowledgement = self._now + self._round_trip + self._spacing
        self._now = max(first_acknowledgement, round_end)
        if lost and no_gap and not self._recovering:
            # No packet behind the lost ones has arrived. The acknowledgements of the others let new packets leave.
            self._unnoticed = lost
            self._window.grow(arrived)
            self._prepare_round(self._window.size)
            return
        self._missing += lost
        if lost and not self._recovering:
            self._begin_recovery(before_gap, behind_gap=arrived - before_gap)
        else:
            self._continue_sending(fates, repeated)

    def _draw_is_acknowledged(self, acknowledgements: int) -> bool:
        """Draw whether any of ``acknowledgements`` acknowledgements arrives."""
        return acknowledgements >= _CERTAIN_ACKNOWLEDGEMENTS or not all(
            self._draw_acknowledgement_loss() for _ in range(acknowledgements)
        )

    def _continue_sending(self, fates: list[bool], repeated: int) -> None:
        """Prepare the next round of a recovery, or of sending without losses."""
        if not self._recovering:
            self._window.grow(len(fates))
        elif self._timed_out:
            # Any loss ends this slow start with a recovery, which halves the window: Linux leaves the state Loss when a
            # repeated packet is lost again (`FLAG_LOST_RETRANS` in `tcp_fastretrans_alert`), and when all repeated ones
            # have arrived and a new one has not.
            if any(fates):
                self._window.halve()
                self._timed_out = False
        else:
            # A repeated packet that is lost again belongs to the loss that halved the window.
            before_halving = repeated + self._new_before_halving
            if any(fates[before_halving:]):
                self._window.halve()
        self._prepare_round(self._window.size)

    def _begin_recovery(self, before_gap: int, behind_gap: int) -> None:
        """Halve the window after the first lost packet, and prepare the first round of a recovery.

        ``before_gap`` packets arrived before the lost packet, and ``behind_gap`` packets after it.
        """
        self._window.halve()
        budget = self._window.size
        if behind_gap < _DUPLICATE_THRESHOLD:
            timer = self._round_trip * _REORDERING_SHARE + _TIMER_LATENESS
            if self._unsent:
                # Acknowledgements of new packets reveal the loss before the timer.
                timer = min(timer, self._round_trip + self._spacing)
            self._now += timer
        # The last packet of the threshold reveals the loss; the packets before it do not.
        unrevealing = _DUPLICATE_THRESHOLD - 1
        if self._unsent:
            # Until the loss is detected, each acknowledgement lets one new packet leave.
            before_detection = before_gap + min(behind_gap, unrevealing)
            # Then every second one lets a packet leave, rounded up, and the lost packet is repeated in any case.
            after_detection = max(1, (behind_gap - unrevealing + 1) // 2)
            budget = before_detection + after_detection
        self._prepare_round(budget)
        # After `_prepare_round`, which resets the number. If fewer packets are behind the gap, the budget is so small
        # that the number covers all new packets of the round.
        self._new_before_halving = before_gap + unrevealing

    def _draw_fates(self, count: int) -> list[bool]:
        """Draw the fates of ``count`` packets: true if lost."""
        self._attempts += 1
        if self._attempts > self._attempt_limit:
            return [False] * count
        draw_loss = self._draw_loss
        return [draw_loss() for _ in range(count)]

    def _draw_failure(self) -> bool:
        """Draw whether a single packet or the acknowledgement of the packet is lost."""
        self._attempts += 1
        if self._attempts > self._attempt_limit:
            return False
        return self._draw_loss() or self._draw_acknowledgement_loss()

    def _prepare_round(self, budget: int) -> None:
        """Set the number of packets of the next round; the round belongs to a recovery if lost packets are missing."""
        self._recovering = self._missing > 0
        self._timed_out = self._timed_out and self._recovering
        self._recovery_budget = budget
        self._new_before_halving = 0

    def _time_out(self, silence_start: float) -> None:
        """Repeat one packet after each time-out until the packet is acknowledged.

        The first time-out begins at the instant ``silence_start``.
        """
        # For the packets of one window, Linux halves the threshold only once (`tcp_enter_loss`): a recovery has done
        # so, and a repeated time-out does not do so again.
        if not self._recovering or self._timed_out:
            self._window.halve()
        self._window.restart()
        self._timed_out = True
        timeout = self._round_trip + TIMEOUT_MARGIN
        self._now = silence_start + timeout
        self.sent_packets += 1
        while self._draw_failure():
            timeout = double_timeout(timeout, self._round_trip)
            self._now += timeout
            self.sent_packets += 1
        self._now += self._round_trip
        self._note_repeated()

    def _note_repeated(self) -> None:
        """Count a missing packet as arrived; none is missing if only the acknowledgements were lost."""
        self._missing = max(0, self._missing - 1)

    def _await_timer(
        self,
        round_end: float,
        judged: int,
        arrived: int,
        is_acknowledged: bool,
        no_gap: bool,
    ) -> None:
        """Wait for the timer at the end of a silence: the time-out during recovery or with a gap, otherwise a probe.

        Of ``judged`` packets, including unnoticed ones, ``arrived`` packets arrived: all before the first loss if
        ``no_gap``.
        """
        silence_start = round_end
        if is_acknowledged:
            silence_start = round_end + self._round_trip
        if self._recovering or not no_gap:
            self._time_out(silence_start)
            self._prepare_round(self._window.size)
        else:
            self._await_probe(
                silence_start, round_end, judged, arrived, is_acknowledged
            )
            budget = self._window.size
            # If only the probe is acknowledged, recovery begins with one packet, as in Linux (`tcp_cwnd_reduction`).
            if not is_acknowledged and not self._timed_out:
                budget = 1
            self._prepare_round(budget)

    def _await_probe(
        self,
        silence_start: float,
        round_end: float,
        judged: int,
        arrived: int,
        is_acknowledged: bool,
    ) -> None:
        """Send a probe, unless a delayed acknowledgement lets new packets leave before."""
        lost = judged - arrived
        # The receiver delays the acknowledgement of an arrived packet without a second one.
        delayed_packets = arrived % 2
        unacknowledged = judged
        if is_acknowledged:
            unacknowledged = lost + delayed_packets
        departure = silence_start + self._probe_timer(unacknowledged)
        acknowledgement = round_end + self._round_trip + _DELAYED_ACKNOWLEDGEMENT
        restarts_timer = delayed_packets == 1 and acknowledgement < departure
        if restarts_timer and self._unsent:
            departure = acknowledgement
        else:
            if restarts_timer:
                departure = acknowledgement + self._probe_timer(lost)
            if not self._draw_probe(departure):
                self._time_out(departure)
                return
        if lost:
            self._window.halve()
        self._now = departure + self._round_trip

    def _draw_probe(self, departure: float) -> bool:
        """Send a probe and return whether the probe is acknowledged.

        A probe is the next unsent packet, otherwise the last packet once more.
        """
        self.sent_packets += 1
        is_new = self._unsent > 0
        if is_new:
            self._unsent -= 1
            if not self._unsent:
                self.sending_seconds = departure
        if self._draw_failure():
            if is_new:
                self._missing += 1
            return False
        if not is_new:
            self._note_repeated()
        return True

    def _probe_timer(self, unacknowledged: int) -> float:
        """Return the seconds from the last acknowledgement to a probe for a number of unacknowledged packets."""
        timeout = self._round_trip + TIMEOUT_MARGIN
        # The receiver may delay the acknowledgement of a single packet, so Linux waits longer (RFC 8985, 7.2).
        if unacknowledged == 1:
            return timeout
        return min(2 * self._round_trip + _TIMER_LATENESS, timeout)
