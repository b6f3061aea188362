"""Windows of layers round a ring of devices: piped-ring parallelism of prima.cpp (Li et al., 2025). Without torch.

prima.cpp divides the layers into k rounds. In each round every device of the ring computes its window of layers, so a
device with a window of w layers holds k * w of them. The first device, the head, has the embedding and the output
matrix. A device whose layers do not fit into its memory reads them from its disk for every token. Since each window is
small, the next one can be read while the other devices compute.

`halda` assigns windows by Halda, the layer assignment algorithm of prima.cpp (``assign_layers_to_device`` in
``common/common.cpp`` at revision bdf9d8e7), which is an integer program. prima.cpp sorts the devices into classes, and
the class of a device decides its cost. A device with too little memory for its layers pays for reading the bytes beyond
its memory; any other device pays only for computing. The cost of a device thus depends on its own window alone.
Therefore dynamic programming solves the program exactly, and also determines the devices that stay unused. The original
iterates over the classes with an ILP solver and neglects the links. Here, messages count as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from testbed.common.errors import InputError
from testbed_generation.placement import REMEDY, LayerCounts
from testbed_generation.sharding import apportion

_HEAD = 0
"""Index of the head in the ring."""


def read_seconds(
    window_layers: int,
    held_layers: int,
    layer_bytes: float,
    memory: float,
    disk_rate: float,
) -> float:
    """Return the seconds in which a device reads one window of layers.

    A window that fits into memory is charged as by Halda, with its part of the bytes that memory has no room for. A
    larger window is read whole: a page cache evicts the pages used longest ago, so each page is evicted before its
    next use. Measured times of llama.cpp on one device are those of reading everything.

    Args:
        window_layers: number of layers of the window.
        held_layers: number of layers of all windows of the device.
        layer_bytes: bytes of a layer.
        memory: bytes free for layers.
        disk_rate: bytes/s of the disk.

    >>> read_seconds(2, 8, layer_bytes=100.0, memory=600.0, disk_rate=50.0)  # a quarter of the missing 200 bytes
    1.0
    >>> read_seconds(8, 8, layer_bytes=100.0, memory=600.0, disk_rate=50.0)
    16.0
    """
    missing = held_layers * layer_bytes - memory
    if missing <= 0:
        return 0.0
    window_bytes = window_layers * layer_bytes
    if window_bytes <= memory:
        rounds = held_layers / window_layers
        return missing / rounds / disk_rate
    return window_bytes / disk_rate


@dataclass(frozen=True)
class Member:
    """A device of the ring."""

    name: str
    layer_seconds: float
    """Time of one layer for one decoded token."""
    memory: float
    """Bytes free for layers."""
    disk_rate: float | None = None
    """Bytes/s at which layers beyond the memory are read; None: all layers of the device must fit."""


@dataclass(frozen=True)
class Ring:
    """Inputs for dividing layers among the devices of a ring."""

    members: tuple[Member, ...]
    """Devices in the order of the ring, the head first."""
    layers: int
    """Number of layers of the model."""
    layer_bytes: float
    """Bytes of a layer's weights and caches."""
    message_seconds: Callable[[str, str], float]
    """Time of sending a token's activations from one device to another; infinite without a link."""
    output_seconds: float = 0.0
    """Time of the output matrix on the head."""
    prefetch: bool = True
    """Whether a device reads its next window while other devices compute."""

    def member(self, name: str) -> Member:
        """Return a device by name."""
        return next(member for member in self.members if member.name == name)

    def device_seconds(self, member: Member, window_layers: int, rounds: int) -> float:
        """Return Halda's cost of a device for one token; infinite if its layers do not fit and it has no disk."""
        computing = rounds * window_layers * member.layer_seconds
        missing = rounds * window_layers * self.layer_bytes - member.memory
        if missing <= 0:
            return computing
        if member.disk_rate is None:
            return math.inf
        return computing + missing / member.disk_rate

    def device_read_seconds(
        self, member: Member, window_layers: int, rounds: int
    ) -> float:
        """Return the seconds in which a device reads one window; 0 for a device without a disk."""
        if member.disk_rate is None:
            return 0.0
        return read_seconds(
            window_layers,
            rounds * window_layers,
            self.layer_bytes,
            member.memory,
            member.disk_rate,
        )

    def can_prefetch(self, member: Member, window_layers: int) -> bool:
        """Return whether a device reads a window ahead.

        A window larger than the device's memory is evicted before its use, so it is not read ahead.
        """
        return self.prefetch and window_layers * self.layer_bytes <= member.memory


@dataclass(frozen=True)
class Windows:
    """The windows of all devices, which are the same in each round."""

    rounds: int
    layer_counts: LayerCounts
    """Each used device in the order of the ring, with the number of layers of its window."""

    def halda_seconds(self, ring: Ring) -> float:
        """Return Halda's objective, with the messages neglected by Halda.

        Computing, messages and reads follow each other. Each byte beyond a device's memory is read once for a token.
        """
        messages = self.rounds * self._round_message_seconds(ring)
        seconds = ring.output_seconds + messages
        for name, window_layers in self.layer_counts:
            member = ring.member(name)
            seconds += ring.device_seconds(member, window_layers, self.rounds)
        return seconds

    def token_seconds(self, ring: Ring) -> float:
        """Return the seconds of one token of a single request, with windows read ahead where possible.

        A round takes at least the sum of all computing, all messages, and the reads of devices that cannot read ahead.
        It also takes at least as long as any single device computes and reads.
        """
        round_seconds = self._round_message_seconds(ring)
        longest_device_seconds = 0.0
        for name, window_layers in self.layer_counts:
            member = ring.member(name)
            computing = window_layers * member.layer_seconds
            reading = ring.device_read_seconds(member, window_layers, self.rounds)
            round_seconds += computing
            if not ring.can_prefetch(member, window_layers):
                round_seconds += reading
            # A window that is read ahead must be in memory before the device computes again, one round later.
            longest_device_seconds = max(longest_device_seconds, computing + reading)
        round_seconds = max(round_seconds, longest_device_seconds)
        return self.rounds * round_seconds + ring.output_seconds

    def busiest_seconds(self, ring: Ring) -> float:
        """Return the seconds between two tokens when many requests are in flight and all devices are busy.

        Messages do not count: a device computes for other requests while a message is in transit.
        """
        busiest = 0.0
        for name, window_layers in self.layer_counts:
            member = ring.member(name)
            reading = ring.device_read_seconds(member, window_layers, self.rounds)
            # A device begins to read a window only after it has computed the previous one.
            busy = self.rounds * (window_layers * member.layer_seconds + reading)
            if member is ring.members[_HEAD]:
                busy += ring.output_seconds
            busiest = max(busiest, busy)
        return busiest

    def stages(self) -> LayerCounts:
        """Return the stages of a token: the windows of all rounds, and a stage without layers on the head.

        The last stage has the output matrix.

        >>> Windows(2, (("head", 1), ("other", 3))).stages()
        (('head', 1), ('other', 3), ('head', 1), ('other', 3), ('head', 0))
        """
        windows_of_all_rounds = self.layer_counts * self.rounds
        head, _ = self.layer_counts[0]
        return (*windows_of_all_rounds, (head, 0))

    def message_routes(self) -> list[tuple[str, str]]:
        """Return sender and receiver of each message of one round; empty for a single device.

        >>> Windows(2, (("head", 1), ("other", 3))).message_routes()
        [('head', 'other'), ('other', 'head')]
        """
        senders = [name for name, _ in self.layer_counts]
        if len(senders) == 1:
            return []
        receivers = [*senders[1:], senders[0]]
        return list(zip(senders, receivers, strict=True))

    def _round_message_seconds(self, ring: Ring) -> float:
        """Return the seconds of all messages of one round."""
        seconds = []
        for sender, receiver in self.message_routes():
            seconds.append(ring.message_seconds(sender, receiver))
        return sum(seconds, 0.0)


_States = dict[tuple[int, int], tuple[float, LayerCounts]]
"""(Index of the last device used, layers assigned) -> the shortest time in seconds, and its windows."""


def halda(ring: Ring, rounds: int) -> Windows:
    """Return the windows with the lowest `Windows.halda_seconds` for ``rounds`` rounds.

    The head has at least one layer of each round. Other devices may stay unused.

    Raises `InputError` if the layers do not divide into the rounds, do not fit into memory, or lack a link.

    >>> members = (Member("head", 1.0, 9.0), Member("fast", 0.1, 4.0))
    >>> halda(Ring(members, 8, 1.0, lambda sender, receiver: 0.5), rounds=2).layer_counts
    (('head', 2), ('fast', 2))
    """
    if ring.layers % rounds:
        raise InputError(
            f"{ring.layers} layers do not divide into {rounds} rounds: choose a divisor, or leave 'rounds' out",
            ("workload", "method", "rounds"),
        )
    windows = _cheapest_windows(ring, rounds)
    if windows is None:
        raise _no_windows_error(ring, rounds)
    return windows


def _cheapest_windows(ring: Ring, rounds: int) -> Windows | None:
    """Return the windows of lowest cost; None if every choice lacks memory or a link."""
    per_round = ring.layers // rounds
    head = ring.members[_HEAD]
    states: _States = {}
    for window_layers in range(1, per_round + 1):
        seconds = ring.device_seconds(head, window_layers, rounds)
        # Infinite if the layers do not fit.
        if seconds < math.inf:
            states[_HEAD, window_layers] = (seconds, ((head.name, window_layers),))
    for index in range(1, len(ring.members)):
        _add_member(states, ring, index, rounds)
    cheapest: LayerCounts | None = None
    lowest_seconds = math.inf
    for (last, assigned), (seconds, layer_counts) in states.items():
        if assigned < per_round:
            continue
        if last != _HEAD:
            # Activations return to the head after each round, for its next window or for the output matrix.
            return_seconds = ring.message_seconds(ring.members[last].name, head.name)
            seconds += rounds * return_seconds
        if seconds < lowest_seconds:
            cheapest, lowest_seconds = layer_counts, seconds
    return None if cheapest is None else Windows(rounds, cheapest)


def _add_member(states: _States, ring: Ring, index: int, rounds: int) -> None:
    """Add to ``states`` all states in which the device with this index is the last one used."""
    member = ring.members[index]
    per_round = ring.layers // rounds
    costs = []
    for window_layers in range(per_round + 1):
        costs.append(ring.device_seconds(member, window_layers, rounds))
    # The loop must not see the states that it adds, since it would use this device twice: it goes through a copy.
    for (last, assigned), (seconds, layer_counts) in list(states.items()):
        sender = ring.members[last].name
        messages = rounds * ring.message_seconds(sender, member.name)
        for window_layers in range(1, per_round - assigned + 1):
            total = seconds + messages + costs[window_layers]
            state = (index, assigned + window_layers)
            lowest, _ = states.get(state, (math.inf, ()))
            if total < lowest:
                states[state] = (total, (*layer_counts, (member.name, window_layers)))


def _no_windows_error(ring: Ring, rounds: int) -> InputError:
    """Return the error for a ring without possible windows: the message names a missing link, or the missing memory."""
    # With a link between any two devices, only memory can be missing.
    connected = replace(ring, message_seconds=lambda sender, receiver: 0.0)
    windows = _cheapest_windows(connected, rounds)
    if windows is None:
        return InputError(
            f"{ring.layers} layers do not fit into the memory of the ring: {REMEDY}, or give a 'disk' rate",
            ("workload", "method"),
        )
    error = _missing_link_error(ring, windows)
    # If the ring had all links between these windows, it would have windows.
    assert error is not None
    return error


def _missing_link_error(ring: Ring, windows: Windows) -> InputError | None:
    """Return the error for the first missing link between neighbours; None if all links exist."""
    for sender, receiver in windows.message_routes():
        if ring.message_seconds(sender, receiver) == math.inf:
            return InputError(
                f"{sender} and {receiver} are neighbours in the ring, but no link leads from {sender} to {receiver}: "
                "add the link, or use the topology mesh",
                ("network",),
            )
    return None


def _check_links(ring: Ring, windows: Windows) -> Windows:
    """Return windows whose devices have all links; raises `InputError` for a missing link."""
    error = _missing_link_error(ring, windows)
    if error is not None:
        raise error
    return windows


def even_windows(ring: Ring, rounds: int) -> Windows:
    """Return equal windows for all devices, as prima.cpp's option ``-lw`` can set them.

    Raises `InputError` if the layers do not divide into the rounds, or do not fit.
    """
    per_round = _layers_per_round(ring, rounds)
    counts = apportion(per_round, [1.0] * len(ring.members), "layers")
    layer_counts = []
    for member, window_layers in zip(ring.members, counts, strict=True):
        if not _fits(ring, member, window_layers, rounds):
            raise _no_memory_error(member, rounds * window_layers)
        layer_counts.append((member.name, window_layers))
    return _check_links(ring, Windows(rounds, tuple(layer_counts)))


def memory_windows(ring: Ring, rounds: int) -> Windows:
    """Return windows in proportion to free memory: the rule of exo, and of prima.cpp without Halda.

    A device without a disk, such as a GPU, has no more layers than fit into its memory; the others share the rest.
    Raises `InputError` if the layers do not fit, or if the head has no memory for a layer of each round.

    >>> members = (Member("small", 1.0, 2.0, disk_rate=9.0), Member("large", 1.0, 6.0))
    >>> memory_windows(Ring(members, 8, 1.0, lambda sender, receiver: 0.5), rounds=2).layer_counts
    (('small', 1), ('large', 3))
    >>> memory_windows(Ring(members, 16, 1.0, lambda sender, receiver: 0.5), rounds=2).layer_counts
    (('small', 5), ('large', 3))
    """
    counts = _share_by_memory(ring, rounds)
    head = ring.members[_HEAD]
    # The first stage of a token and the output matrix are on the device with the first window.
    if not counts[head.name]:
        raise _no_memory_error(head, rounds)
    layer_counts = []
    for member in ring.members:
        if counts[member.name] > 0:
            layer_counts.append((member.name, counts[member.name]))
    return _check_links(ring, Windows(rounds, tuple(layer_counts)))


def _share_by_memory(ring: Ring, rounds: int) -> dict[str, int]:
    """Return the number of layers of each device's window, in proportion to free memory, possibly none."""
    counts: dict[str, int] = {}
    remaining = _layers_per_round(ring, rounds)
    candidates = list(ring.members)
    # In each pass the candidates share the remaining layers. A device whose share does not fit gets as many layers as
    # fit and is no candidate any more, so there are at most as many passes as devices.
    for _ in ring.members:
        # A device with a disk and no free memory can read all its layers, so it has a share as well: one byte, since
        # shares must be positive.
        shares = [max(member.memory, 1.0) for member in candidates]
        window_sizes = apportion(remaining, shares, "layers")
        full_members = []
        for member, window_layers in zip(candidates, window_sizes, strict=True):
            counts[member.name] = window_layers
            if not _fits(ring, member, window_layers, rounds):
                full_members.append(member)
        if not full_members:
            break
        # Without another candidate, no device has room for the layers that do not fit.
        if len(full_members) == len(candidates):
            first_full = full_members[0]
            raise _no_memory_error(first_full, rounds * counts[first_full.name])
        for member in full_members:
            # Free memory is negative if embedding and buffers alone do not fit.
            window_layers = max(0, int(member.memory / ring.layer_bytes / rounds))
            counts[member.name] = window_layers
            remaining -= window_layers
            candidates.remove(member)
    return counts


def _layers_per_round(ring: Ring, rounds: int) -> int:
    """Return the number of layers of one round.

    Raises `InputError` if the layers do not divide into the rounds, or if a round has fewer layers than the ring has
    devices.
    """
    per_round, device_count = ring.layers // rounds, len(ring.members)
    if ring.layers % rounds or per_round < device_count:
        raise InputError(
            f"{ring.layers} layers do not divide into {rounds} rounds of a window for each of {device_count} devices: "
            "choose other 'rounds'",
            ("workload", "method", "rounds"),
        )
    return per_round


def _fits(ring: Ring, member: Member, window_layers: int, rounds: int) -> bool:
    return ring.device_seconds(member, window_layers, rounds) < math.inf


def _no_memory_error(member: Member, layers: int) -> InputError:
    noun = "layer" if layers == 1 else "layers"
    return InputError(
        f"{member.name} has no memory for {layers} {noun}: {REMEDY}, or give a 'disk' rate",
        ("workload", "method"),
    )


def _divisors(number: int) -> list[int]:
    divisors = []
    for candidate in range(1, number + 1):
        if number % candidate == 0:
            divisors.append(candidate)
    return divisors


def best_windows(
    ring: Ring, assign_windows: Callable[[Ring, int], Windows], rounds: int | None
) -> Windows:
    """Return the windows for ``rounds`` rounds; None: for the number of rounds with the shortest time per token.

    Raises the `InputError` of the first number of rounds if no number allows a division.
    """
    candidates = _divisors(ring.layers) if rounds is None else [rounds]
    best: Windows | None = None
    first_error: InputError | None = None
    for candidate in candidates:
        try:
            windows = assign_windows(ring, candidate)
        except InputError as error:
            # A round may have fewer layers than devices, or memory may be too small; another number may be possible.
            first_error = first_error or error
            continue
        if best is None or windows.token_seconds(ring) < best.token_seconds(ring):
            best = windows
    if best is None:
        # Each candidate has windows or an error, and there is at least one candidate.
        assert first_error is not None
        raise first_error
    return best
