"""TCP Reno as in Linux, simulated per round trip: transfer time of a message over a lossy link.

The simulation proceeds in rounds. A round sends as many packets as the window holds, and the next round follows one
round trip later. Without a loss the window grows: by the number of sent packets until it reaches a threshold, by one
packet afterwards. A loss begins a recovery: the window is halved once, and the lost packets are repeated in the next
rounds. If no later packet reveals the loss, the sender waits for a timer: a probe (one packet more) after two round
trips, or the retransmission time-out. The constants are those of Linux 6, `net/ipv4/tcp_recovery.c` and `tcp_output.c`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

RETRANSMISSION_TIMEOUT = 0.2
"""Seconds beyond the round trip before TCP sends unacknowledged bytes again (Linux's minimum)."""
_LONGEST_TIMEOUT = 2.0
"""Maximum seconds of a time-out beyond the round trip: the agent reconnects after this silence."""
FIRST_WINDOW = 10
"""Initial window in packets."""
_MIN_WINDOW = 2
"""Minimum congestion window in packets after a loss (RFC 5681)."""
_DELAYED_ACKNOWLEDGEMENT = 0.04
"""A receiver acknowledges every second packet at once, and a single one after this number of seconds."""
_TIMER_TICK = 0.005
"""Delay of short timers in seconds: the kernel adds 2 ms and rounds up to its tick of 4 ms."""
_DUPLICATE_THRESHOLD = 3
"""Number of packets after a lost one whose arrival reveals the loss at once; with fewer, a timer decides."""
_REORDERING_SHARE = 1 / 4
"""Share of a round trip for which RACK waits, since a missing packet may only be late (RFC 8985, 6.2)."""
_QUEUED_PACKETS = 2
"""TCP small queues: beyond the packets on the way, at most this number of packets waits before the link, ..."""
_QUEUED_SECONDS = 0.001
"""... plus the packets that the link sends in this number of seconds."""
_CERTAIN_ACKNOWLEDGEMENTS = 4
"""Number of acknowledgements of which one arrives for certain: a loss of all is too rare to matter, and draws take
time."""
_SPARE_ATTEMPTS = 10_000
"""Maximum number of rounds and time-outs beyond one per packet, after which the message gets through."""

Draw = Callable[[], bool]


def double_timeout(seconds: float, round_trip: float) -> float:
    """Return the time-out after one of ``seconds`` without an acknowledgement (RFC 6298, 5.5)."""
    return min(2 * seconds, round_trip + _LONGEST_TIMEOUT)


class Window:
    """Congestion window in packets, kept from one message to the next."""

    __slots__ = ("size", "threshold")

    def __init__(self) -> None:
        self.size: int = FIRST_WINDOW
        self.threshold: float = math.inf
        """Size in packets from which a round adds only one packet."""

    def grow(self, sent: int) -> None:
        """Grow if a round without loss used the window.

        Below the threshold, a round of more than half of the window counts as using the window; above the threshold,
        only a round of the whole window does (Linux, `tcp_is_cwnd_limited`).
        """
        if self.size >= self.threshold or self.size < 2 * sent:
            self.raise_by(sent)

    def raise_by(self, acknowledged: int) -> None:
        """Grow by the acknowledged packets of a round: slow start up to the threshold, then one packet for a window."""
        if self.size < self.threshold:
            self.size = int(min(self.size + acknowledged, self.threshold))
        elif acknowledged >= self.size:
            self.size += 1

    def halve(self) -> None:
        """Shrink after a loss revealed by later packets."""
        self.size = max(self.size // 2, _MIN_WINDOW)
        self.threshold = float(self.size)

    def restart(self) -> None:
        """Shrink to the minimum after a time-out; the window then grows fast up to the threshold."""
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
        lost: Draw,
        draw_acknowledgement_loss: Draw,
    ) -> None:
        """Begin with all packets unsent.

        ``spacing`` is the time of a packet on the link and ``round_trip`` the sum of both delays, in seconds. ``lost``
        and ``draw_acknowledgement_loss`` draw the fates of the next packet and of the next acknowledgement: true if
        lost.
        """
        self.sent_packets = 0
        """Number of sent packets, including repeated ones and probes."""
        self.sending_seconds = 0.0
        """Seconds until every packet had left for the first time."""
        self.last_departure = 0.0
        """Seconds until the packet that arrives last had left."""
        self.last_round_size = 0
        """Number of packets of the last round."""
        self._window = window
        self._unsent = packets
        """Number of unsent packets."""
        self._missing = 0
        """Number of packets that the sender knows to be lost and has not repeated."""
        self._unnoticed = 0
        """Number of lost packets at the end of the last round, which only packets of the next round reveal."""
        self._spacing = spacing
        self._round_trip = round_trip
        self._draw_loss = lost
        self._draw_acknowledgement_loss = draw_acknowledgement_loss
        self._now = 0.0
        """Seconds since the first packet began to leave."""
        self._recovering = False
        """Whether the round repeats lost packets, so that Linux is in the state Recovery or Loss."""
        self._timed_out = False
        """Whether the current recovery has had a time-out, which is Linux's state Loss."""
        self._recovery_budget = 0
        """Number of packets in the next round of a recovery."""
        self._new_before_halving = 0
        """Number of new packets in the next round that leave before the sender learns of the loss; their loss does not
        halve the window again."""
        self._attempts = 0
        """Number of rounds and repetitions so far."""
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
        count = repeated + new
        self._missing -= repeated
        self._unsent -= new
        # A fate is true for a lost packet.
        fates = [True] * unnoticed + self._draw_fates(count)
        lost = sum(fates)
        self.sent_packets += count
        self.last_round_size = count
        # The instant at which the last packet of the round has left.
        round_end = self._now + count * self._spacing
        is_last_round = not self._unsent and not self._missing
        if new and not self._unsent:
            self.sending_seconds = round_end
        if not lost and is_last_round:
            self._now = round_end + self._round_trip
            if self._timed_out:
                self._window.raise_by(count)
            elif not self._recovering:
                self._window.grow(count)
            return
        self._process_fates(fates, repeated, round_end)

    def _process_fates(
        self, fates: list[bool], repeated: int, round_end: float
    ) -> None:
        """Process the fates of a round with losses, or of a round followed by others.

        Unnoticed losses of the round before come first in ``fates``. ``repeated`` is the number of repeated packets in
        the round, and ``round_end`` the instant at which its last packet has left.
        """
        count = len(fates)
        lost = sum(fates)
        arrived = count - lost
        before_gap = fates.index(True) if lost else count
        # If only the last packets are lost, the receiver sees no gap and acknowledges every other packet.
        in_order = before_gap == arrived
        acknowledgements = (
            arrived // 2 if in_order and not self._recovering else arrived
        )
        is_acknowledged = self._draw_is_acknowledged(acknowledgements)
        if self._timed_out and is_acknowledged:
            # After a time-out, slow start begins while packets are still missing (RFC 5681, 3.1): Linux withholds it
            # in the states CWR and Recovery alone (`tcp_cong_control`). Packets behind a gap do not raise the window
            # (`tcp_may_raise_cwnd`). New packets that Linux sends before repeated ones (F-RTO) are left out.
            self._window.raise_by(before_gap)
        is_last_round = not self._unsent and not self._missing
        self._missing += lost
        if not is_acknowledged or (lost and in_order and is_last_round):
            self._await_timer(round_end, count, arrived, is_acknowledged, in_order)
            return
        self._now = max(self._now + self._round_trip + self._spacing, round_end)
        if lost and in_order and not self._recovering:
            # No packet behind the lost ones has arrived. The acknowledgements of the others let new packets leave.
            self._missing -= lost
            self._unnoticed = lost
            self._window.grow(arrived)
            self._prepare_round(self._window.size)
        elif lost and not self._recovering:
            self._begin_recovery(in_order=before_gap, behind=arrived - before_gap)
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
        # A repeated packet that is lost again belongs to the loss that halved the window.
        elif any(fates[repeated + self._new_before_halving :]):
            self._window.halve()
        self._prepare_round(self._window.size)

    def _begin_recovery(self, in_order: int, behind: int) -> None:
        """Halve the window: ``in_order`` packets arrived before the first lost packet, and ``behind`` after it."""
        self._window.halve()
        budget = self._window.size
        if behind < _DUPLICATE_THRESHOLD:
            timer = self._round_trip * _REORDERING_SHARE + _TIMER_TICK
            if self._unsent:
                # Acknowledgements of new packets reveal the loss before the timer.
                timer = min(timer, self._round_trip + self._spacing)
            self._now += timer
        if self._unsent:
            # Until the loss is detected, each acknowledgement lets one new packet leave; then every second one does.
            before = in_order + min(behind, _DUPLICATE_THRESHOLD - 1)
            budget = before + max(1, (behind - 1) // 2)
        self._prepare_round(budget)
        # After `_prepare_round`, which resets the number.
        self._new_before_halving = in_order + _DUPLICATE_THRESHOLD - 1

    def _draw_fates(self, count: int) -> list[bool]:
        """Draw the fates of ``count`` packets: true if lost."""
        self._attempts += 1
        if self._attempts > self._attempt_limit:
            return [False] * count
        lost = self._draw_loss
        return [lost() for _ in range(count)]

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

    def _time_out(self, since: float) -> None:
        """Repeat one packet until acknowledged, as the instant ``since`` begins a silence up to the time-out."""
        # Linux halves the threshold once for a window (`tcp_enter_loss`): a recovery has done so, and a time-out that
        # repeats without an acknowledgement does not do so again.
        if not self._recovering or self._timed_out:
            self._window.halve()
        self._window.restart()
        self._timed_out = True
        wait = self._round_trip + RETRANSMISSION_TIMEOUT
        self._now = since + wait
        self.sent_packets += 1
        while self._draw_failure():
            wait = double_timeout(wait, self._round_trip)
            self._now += wait
            self.sent_packets += 1
        self._now += self._round_trip
        self._missing = max(0, self._missing - 1)

    def _await_timer(
        self,
        round_end: float,
        count: int,
        arrived: int,
        is_acknowledged: bool,
        in_order: bool,
    ) -> None:
        """Wait for the timer at the end of a silence: the time-out during recovery, otherwise a probe.

        ``count`` packets were sent and ``arrived`` of them arrived, all before the first loss if ``in_order``.
        """
        since = round_end + self._round_trip if is_acknowledged else round_end
        if self._recovering or not in_order:
            self._time_out(since)
            self._prepare_round(self._window.size)
        else:
            self._send_probe(since, round_end, count, arrived, is_acknowledged)
            budget = self._window.size
            # If only the probe is acknowledged, recovery begins with one packet, as in Linux (`tcp_cwnd_reduction`).
            if not is_acknowledged and not self._timed_out:
                budget = 1
            self._prepare_round(budget)

    def _send_probe(
        self,
        since: float,
        round_end: float,
        count: int,
        arrived: int,
        is_acknowledged: bool,
    ) -> None:
        """Send a probe, unless a delayed acknowledgement lets new packets leave before."""
        lost = count - arrived
        outstanding = lost + arrived % 2 if is_acknowledged else count
        due = since + self._probe_timer(outstanding)
        delayed = round_end + self._round_trip + _DELAYED_ACKNOWLEDGEMENT
        probes = True
        # The receiver acknowledges an odd packet after a delay, which restarts the timer.
        if arrived % 2 and delayed < due:
            due = delayed + self._probe_timer(lost)
            if self._unsent:
                due, probes = delayed, False
        if probes:
            self.sent_packets += 1
            # A probe is the next unsent packet, otherwise the last packet once more.
            is_new = self._unsent > 0
            if is_new:
                self._unsent -= 1
                if not self._unsent:
                    self.sending_seconds = due
            if self._draw_failure():
                if is_new:
                    self._missing += 1
                self._time_out(due)
                return
            if not is_new:
                self._missing = max(0, self._missing - 1)
        if lost:
            self._window.halve()
        self._now = due + self._round_trip

    def _probe_timer(self, outstanding: int) -> float:
        """Return the seconds from the last acknowledgement to a probe, with ``outstanding`` unacknowledged packets."""
        timeout = self._round_trip + RETRANSMISSION_TIMEOUT
        # The receiver may delay the acknowledgement of a single packet, so Linux waits longer (RFC 8985, 7.2).
        if outstanding == 1:
            return timeout
        return min(2 * self._round_trip + _TIMER_TICK, timeout)
