"""Windows of layers round a ring of devices: piped-ring parallelism and Halda's assignment (Li et al., 2025). Pure.

prima.cpp divides the layers into k rounds. In each round every device of the ring computes its window of layers, so a
device with a window of w layers holds k * w of them. The first device, the head, has the embedding and the output
matrix. A device whose layers do not fit into its memory reads them from its disk for every token. Since each window is
small, the next one can be read while the other devices compute.

`halda` assigns windows by the integer program of prima.cpp's revision bdf9d8e7 (``assign_layers_to_device`` in
``common/common.cpp``). There, the set of a device decides its cost. A device with too little memory for its layers pays
for reading the bytes beyond its memory; any other device pays only for computing. The cost of a device thus depends on
its own window alone. Therefore dynamic programming solves the program exactly, and also finds the devices that stay
unused. The original iterates over sets with an ILP solver and neglects the links. Here, messages count as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from testbed.common.errors import InputError
from testbed_generation.placement import REMEDY, Layers
from testbed_generation.sharding import apportion


def read_seconds(
    window: int, held: int, layer_bytes: float, memory: float, rate: float
) -> float:
    """Return the seconds in which a device reads one window of its layers.

    A window that fits into memory is charged as by Halda, with its part of the bytes that memory has no room for. A
    larger window is read whole: a page cache evicts the pages used longest ago, so each page is evicted before its
    next use. Measured times of llama.cpp on one device are those of reading everything.

    Args:
        window: layers of the window.
        held: layers of all windows of the device.
        layer_bytes: bytes of a layer.
        memory: bytes free for layers.
        rate: bytes/s of the disk.

    >>> read_seconds(2, 8, layer_bytes=100.0, memory=600.0, rate=50.0)  # 200 of 800 bytes, a quarter of them each time
    1.0
    >>> read_seconds(8, 8, layer_bytes=100.0, memory=600.0, rate=50.0)
    16.0
    """
    missing = held * layer_bytes - memory
    if missing <= 0:
        return 0.0
    if window * layer_bytes <= memory:
        rounds = held / window
        return missing / rounds / rate
    return window * layer_bytes / rate


@dataclass(frozen=True)
class Member:
    """A device of the ring."""

    name: str
    layer_seconds: float
    """Time of one layer for one decoded token."""
    memory: float
    """Bytes free for layers."""
    disk: float | None = None
    """Bytes/s at which layers beyond the memory are read; None: all layers of the device must fit."""


@dataclass(frozen=True)
class Ring:
    """Inputs for dividing layers over a ring."""

    members: tuple[Member, ...]
    """In the order of the ring, the head first."""
    layers: int
    layer_bytes: float
    """Bytes of a layer's weights and caches."""
    send: Callable[[str, str], float]
    """Seconds of a token's values from one device to another; infinite where there is no link."""
    output_seconds: float = 0.0
    """Time of the output matrix on the head."""
    prefetch: bool = True
    """Whether a device reads its next window while other devices compute."""

    def member(self, name: str) -> Member:
        """Return a device by name."""
        return next(member for member in self.members if member.name == name)

    def device_seconds(self, member: Member, window: int, rounds: int) -> float:
        """Return Halda's cost of a device for one token; infinite if its layers do not fit and it has no disk."""
        computing = rounds * window * member.layer_seconds
        missing = rounds * window * self.layer_bytes - member.memory
        if missing <= 0:
            return computing
        return math.inf if member.disk is None else computing + missing / member.disk

    def device_read_seconds(self, member: Member, window: int, rounds: int) -> float:
        """Return the seconds in which a device reads one window; 0 for a device without a disk."""
        if member.disk is None:
            return 0.0
        held = rounds * window
        return read_seconds(window, held, self.layer_bytes, member.memory, member.disk)

    def can_prefetch(self, member: Member, window: int) -> bool:
        """Return whether a device reads a window ahead.

        A window larger than the device's memory is evicted before its use, so it is not read ahead.
        """
        return self.prefetch and window * self.layer_bytes <= member.memory


@dataclass(frozen=True)
class Windows:
    """The windows of all devices, equal in each round."""

    rounds: int
    windows: Layers
    """Name and window of each device in the order of the ring; a window is a number of layers."""

    def halda_seconds(self, ring: Ring) -> float:
        """Return Halda's objective, with the messages that Halda neglects.

        Computing, messages and reads follow each other. Each byte beyond a device's memory is read once for a token.
        """
        seconds = ring.output_seconds + self.rounds * self._circle_seconds(ring)
        for name, window in self.windows:
            seconds += ring.device_seconds(ring.member(name), window, self.rounds)
        return seconds

    def token_seconds(self, ring: Ring) -> float:
        """Return the seconds of one token of a single request, with windows read ahead where possible.

        A round takes at least the sum of all computing, all messages, and the reads of devices that cannot read ahead.
        It also takes at least as long as any single device computes and reads.
        """
        round_seconds = self._circle_seconds(ring)
        longest = 0.0
        for name, window in self.windows:
            member = ring.member(name)
            computing = window * member.layer_seconds
            reading = ring.device_read_seconds(member, window, self.rounds)
            round_seconds += computing
            if not ring.can_prefetch(member, window):
                round_seconds += reading
            # Even a read-ahead must end before the device computes again, one round later.
            longest = max(longest, computing + reading)
        return self.rounds * max(round_seconds, longest) + ring.output_seconds

    def busiest_seconds(self, ring: Ring) -> float:
        """Return the seconds between two tokens when many requests are in flight and all devices are busy.

        Messages do not count: a device computes for other requests while a message travels.
        """
        busiest = 0.0
        for name, window in self.windows:
            member = ring.member(name)
            reading = ring.device_read_seconds(member, window, self.rounds)
            # A device begins to read a window only after it has computed the one before.
            busy = self.rounds * (window * member.layer_seconds + reading)
            if member is ring.members[_HEAD]:
                busy += ring.output_seconds
            busiest = max(busiest, busy)
        return busiest

    def stages(self) -> Layers:
        """Return the stages of a token: all windows of all rounds, and no layer on the head, for the output matrix.

        >>> Windows(2, (("head", 1), ("other", 3))).stages()
        (('head', 1), ('other', 3), ('head', 1), ('other', 3), ('head', 0))
        """
        return (*self.windows * self.rounds, (self.windows[0][0], 0))

    def hops(self) -> list[tuple[str, str]]:
        """Return sender and receiver of each message of one round; empty for a single device.

        >>> Windows(2, (("head", 1), ("other", 3))).hops()
        [('head', 'other'), ('other', 'head')]
        """
        names = [name for name, _ in self.windows]
        if len(names) == 1:
            return []
        following = [*names[1:], names[0]]
        return list(zip(names, following, strict=True))

    def _circle_seconds(self, ring: Ring) -> float:
        """Return the seconds of all messages of one round."""
        hops = self.hops()
        if not hops:
            return 0.0
        return sum([ring.send(one, other) for one, other in hops])


_HEAD = 0
"""Place of the head in the ring."""

States = dict[tuple[int, int], tuple[float, Layers]]
"""(Place of the last device used, layers assigned) -> the least seconds, and the windows that take these seconds."""


def halda(ring: Ring, rounds: int) -> Windows:
    """Return the windows with the least `Windows.halda_seconds` for ``rounds`` rounds.

    The head has at least one layer of each round. Other devices may stay unused.

    Raises `InputError` if the layers do not divide into the rounds, do not fit into memory, or lack a link.

    >>> members = (Member("head", 1.0, 9.0), Member("fast", 0.1, 4.0))
    >>> halda(Ring(members, 8, 1.0, lambda one, other: 0.5), rounds=2).windows
    (('head', 2), ('fast', 2))
    """
    if ring.layers % rounds:
        raise InputError(
            f"{ring.layers} layers do not divide into {rounds} rounds: choose a divisor, or leave 'rounds' out",
            ("workload", "method", "rounds"),
        )
    windows = _least_windows(ring, rounds)
    if windows is None:
        raise _no_windows(ring, rounds)
    return windows


def _least_windows(ring: Ring, rounds: int) -> Windows | None:
    """Return the windows of least cost; None if every choice lacks memory or a link."""
    total = ring.layers // rounds
    head = ring.members[_HEAD]
    states: States = {}
    for window in range(1, total + 1):
        seconds = ring.device_seconds(head, window, rounds)
        # Infinite where the layers do not fit.
        if seconds < math.inf:
            states[_HEAD, window] = (seconds, ((head.name, window),))
    for place in range(1, len(ring.members)):
        _add_member(states, ring, place, rounds)
    chosen: Layers | None = None
    least = math.inf
    for (last, assigned), (seconds, windows) in states.items():
        if assigned < total:
            continue
        if last != _HEAD:
            # Values return to the head after each round, for its next window or for the output matrix.
            seconds += rounds * ring.send(ring.members[last].name, head.name)
        if seconds < least:
            chosen, least = windows, seconds
    return None if chosen is None else Windows(rounds, chosen)


def _no_windows(ring: Ring, rounds: int) -> InputError:
    """Return the error for a ring without possible windows: it names a missing link, or the missing memory."""
    # With a link between any two devices, only memory can be missing.
    connected = replace(ring, send=lambda one, other: 0.0)
    windows = _least_windows(connected, rounds)
    if windows is None:
        return InputError(
            f"{ring.layers} layers do not fit into the memory of the ring: {REMEDY}, or give a 'disk' rate",
            ("workload", "method"),
        )
    error = _missing_link(ring, windows)
    assert error is not None
    return error


def _missing_link(ring: Ring, windows: Windows) -> InputError | None:
    """Return the error for the first missing link between neighbours; None if all links exist."""
    for one, other in windows.hops():
        if ring.send(one, other) == math.inf:
            return InputError(
                f"{one} and {other} are neighbours in the ring, but no link leads from {one} to {other}: add the link, "
                "or use the topology mesh",
                ("network",),
            )
    return None


def _check_links(ring: Ring, windows: Windows) -> Windows:
    """Return windows whose devices have all links; raises `InputError` for a missing link."""
    error = _missing_link(ring, windows)
    if error is not None:
        raise error
    return windows


def _add_member(states: States, ring: Ring, place: int, rounds: int) -> None:
    """Add all states in which a device is the last one used."""
    member = ring.members[place]
    total = ring.layers // rounds
    costs = []
    for window in range(total + 1):
        costs.append(ring.device_seconds(member, window, rounds))
    for (last, assigned), (seconds, windows) in list(states.items()):
        hop = rounds * ring.send(ring.members[last].name, member.name)
        for window in range(1, total - assigned + 1):
            longer = seconds + hop + costs[window]
            state = (place, assigned + window)
            if longer < states.get(state, (math.inf, ()))[0]:
                states[state] = (longer, (*windows, (member.name, window)))


def even_windows(ring: Ring, rounds: int) -> Windows:
    """Return equal windows for all devices, as prima.cpp's option ``-lw`` can set them."""
    total = _round_layers(ring, rounds)
    sizes = apportion(total, [1.0] * len(ring.members), "layers")
    windows = []
    for member, window in zip(ring.members, sizes, strict=True):
        if not _fits(ring, member, window, rounds):
            raise _does_not_fit(member, rounds * window)
        windows.append((member.name, window))
    return _check_links(ring, Windows(rounds, tuple(windows)))


def memory_windows(ring: Ring, rounds: int) -> Windows:
    """Return windows in proportion to free memory: the rule of exo, and of prima.cpp without Halda.

    A device without a disk, such as a GPU, has no more layers than fit into its memory; the others share the rest.
    Raises `InputError` if the layers do not fit, or if the head has no memory for a layer of each round.

    >>> members = (Member("small", 1.0, 2.0, disk=9.0), Member("large", 1.0, 6.0))
    >>> memory_windows(Ring(members, 8, 1.0, lambda one, other: 0.5), rounds=2).windows
    (('small', 1), ('large', 3))
    >>> memory_windows(Ring(members, 16, 1.0, lambda one, other: 0.5), rounds=2).windows
    (('small', 5), ('large', 3))
    """
    left = _round_layers(ring, rounds)
    sizes: dict[str, int] = {}
    sharing = list(ring.members)
    while True:
        # A device with a disk and no free memory reads all its layers, so it has a share as well: one byte, since
        # negative shares are no proportions, and shares that are all 0 have no sum to divide by.
        shares = [max(member.memory, 1.0) for member in sharing]
        proportional = apportion(left, shares, "layers")
        full = []
        for member, window in zip(sharing, proportional, strict=True):
            sizes[member.name] = window
            if not _fits(ring, member, window, rounds):
                full.append(member)
        if not full:
            break
        # Nobody is left who could take the layers that do not fit.
        if len(full) == len(sharing):
            raise _does_not_fit(full[0], rounds * sizes[full[0].name])
        for member in full:
            # Free memory is negative where embedding and buffers alone do not fit.
            window = max(0, int(member.memory / ring.layer_bytes / rounds))
            sizes[member.name] = window
            left -= window
            sharing.remove(member)
    head = ring.members[_HEAD]
    # The first stage of a token and the output matrix are on the device with the first window.
    if not sizes[head.name]:
        raise _does_not_fit(head, rounds)
    windows = []
    for member in ring.members:
        if sizes[member.name] > 0:
            windows.append((member.name, sizes[member.name]))
    return _check_links(ring, Windows(rounds, tuple(windows)))


def _round_layers(ring: Ring, rounds: int) -> int:
    """Return the number of layers of one round.

    Raises `InputError` if the layers do not divide into the rounds, or if a round has fewer layers than the ring has
    devices.
    """
    total, number = ring.layers // rounds, len(ring.members)
    if ring.layers % rounds or total < number:
        raise InputError(
            f"{ring.layers} layers do not divide into {rounds} rounds of a window for each of {number} devices: choose "
            "other 'rounds'",
            ("workload", "method", "rounds"),
        )
    return total


def _fits(ring: Ring, member: Member, window: int, rounds: int) -> bool:
    return ring.device_seconds(member, window, rounds) < math.inf


def _does_not_fit(member: Member, layers: int) -> InputError:
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
    ring: Ring, assign: Callable[[Ring, int], Windows], rounds: int | None
) -> Windows:
    """Return the windows for ``rounds`` rounds; None: for the number of rounds with the least seconds of a token.

    Raises the `InputError` of the first number of rounds if no number allows a division.
    """
    candidates = _divisors(ring.layers) if rounds is None else [rounds]
    best: Windows | None = None
    refusal: InputError | None = None
    for number in candidates:
        try:
            windows = assign(ring, number)
        except InputError as error:
            # Fewer layers in a round than devices, or too little memory: another number may do.
            refusal = refusal or error
            continue
        if best is None or windows.token_seconds(ring) < best.token_seconds(ring):
            best = windows
    if best is None:
        assert refusal is not None
        raise refusal
    return best
