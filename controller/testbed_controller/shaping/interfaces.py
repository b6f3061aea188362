"""Interfaces of the calling thread's network namespace: found, made and set up over netlink.

Trees of ``tc`` are not made here but written as its own commands (`sender.py`, `netem.py`): those read and compare
well.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from testbed.common.errors import HostError
from testbed_controller.shaping.namespaces import command

_SIOCETHTOOL = 0x8946
_LINK_SCOPE = 253
"""linux/rtnetlink.h: reached directly."""
_MAIN_TABLE = 254
"""linux/rtnetlink.h: where routes are unless they name another table."""
_OF_BRIDGE = 4
"""linux/neighbour.h: an entry of the bridge that a port belongs to."""
_STATIC = 0x40
"""linux/neighbour.h: an entry that is neither learned nor forgotten."""
_NO_ADDRESS = 1
"""linux/if_link.h: what the kernel is to do about IPv6 addresses by itself."""
# linux/ethtool.h: (get, set) of each offload that would merge packets into larger ones.
_OFFLOADS = {"tso": (0x1E, 0x1F), "gso": (0x23, 0x24), "gro": (0x2B, 0x2C)}


@dataclass(frozen=True)
class Interface:
    """The interface that carries a device's data address."""

    name: str
    broadcast: str | None


@contextlib.contextmanager
def _netlink(purpose: str) -> Iterator[Any]:
    try:
        with IPRoute() as route:
            yield route
    except (NetlinkError, OSError) as error:
        raise HostError(f"{purpose} failed: {error}") from error


def interface_of(address: str) -> Interface | None:
    """Find the interface by its IPv4 address; None where none has it."""
    with _netlink("looking up the addresses of interfaces") as route:
        for held in route.get_addr(family=socket.AF_INET):
            if held.get("local") == address:
                return Interface(held.get("label"), held.get("broadcast"))
    return None


def interface_names() -> set[str]:
    """Return the names of all interfaces."""
    with _netlink("listing interfaces") as route:
        return {link.get("ifname") for link in route.get_links()}


def make_bridge(name: str) -> None:
    """Make a bridge that has no address, so that nobody answers there; raises HostError where the kernel has none."""
    with _netlink(f"adding the bridge {name}") as route:
        # Without snooping, which asks for members that nobody announces, multicasts go to all.
        route.link("add", ifname=name, kind="bridge", br_mcast_snooping=0)
        _bring_up(route, name)


def plug(port: str, bridge: str, interface: str, hardware: str, namespace: int) -> None:
    """Make a pair of interfaces: a port of the bridge here, and one in the network namespace of this descriptor."""
    with _netlink(f"adding the port {port}") as route:
        route.link(
            "add", ifname=port, kind="veth", peer={"ifname": interface, "net_ns_fd": namespace, "address": hardware}
        )
        _bring_up(route, port, master=socket.if_nametoindex(bridge))
        # Until a bridge has learned an address, it sends frames for it to all ports.
        index = socket.if_nametoindex(port)
        route.fdb("add", ifindex=index, lladdr=hardware, flags=_OF_BRIDGE, state=_STATIC)


def set_neighbours(name: str, hardware: Mapping[str, str]) -> None:
    """Give an interface the hardware addresses of these IPv4 addresses, for good.

    Nobody then asks for them, and they take no room in the table of neighbours, whose limit holds for all namespaces
    of the kernel together: 40 devices that all know each other would fill it.
    """
    lines = [f"neigh replace {address} lladdr {other} nud permanent dev {name}" for address, other in hardware.items()]
    if lines:
        command(["ip", "-batch", "-"], "\n".join(lines) + "\n")


def set_address(name: str, address: str, network: IPv4Network) -> None:
    """Give an interface its address, and bring it up."""
    with _netlink(f"setting the address of {name}") as route:
        index, broadcast = socket.if_nametoindex(name), str(network.broadcast_address)
        route.addr("add", index=index, address=address, prefixlen=network.prefixlen, broadcast=broadcast, label=name)
        _bring_up(route, name)


def _bring_up(route: Any, name: str, **settings: Any) -> None:
    """Bring an interface up without an IPv6 address, which no link would hold."""
    index = socket.if_nametoindex(name)
    if Path("/proc/thread-self/net/if_inet6").exists():
        none = {"attrs": [["AF_INET6", {"attrs": [["IFLA_INET6_ADDR_GEN_MODE", _NO_ADDRESS]]}]]}
        route.link("set", index=index, IFLA_AF_SPEC=none)
    route.link("set", index=index, state="up", **settings)


def add_ifb(name: str) -> None:
    """Make an intermediate device that packets can be redirected to; raises HostError where the kernel has none."""
    with _netlink(f"adding the intermediate device {name} (kernel module ifb)") as route:
        route.link("add", ifname=name, kind="ifb")
        route.link("set", ifname=name, state="up")


def delete(name: str) -> None:
    """Remove an interface."""
    with _netlink(f"removing the interface {name}") as route:
        route.link("del", ifname=name)


def bound_segments(name: str, segments: int) -> None:
    """Let TCP hand down at most this many packets in one piece: a queue counts that as one and sends it at once."""
    with _netlink(f"setting gso_max_segs of {name}") as route:
        route.link("set", index=socket.if_nametoindex(name), gso_max_segs=segments)


def segments_of(name: str) -> int:
    """Return how many packets TCP may hand down in one piece."""
    with _netlink(f"looking up {name}") as route:
        [link] = route.get_links(socket.if_nametoindex(name))
        return int(link.get("gso_max_segs"))


def route_by_default(name: str) -> None:
    """Let the interface carry what no other route is for, multicast too, in place of the one that did."""
    with _netlink(f"making {name} the default route") as route:
        # Without a gateway: what is not on the network is looked for there, and not found.
        route.route("replace", dst="0.0.0.0/0", oif=socket.if_nametoindex(name), scope=_LINK_SCOPE)


def set_congestion_control(name: str, algorithm: str) -> None:
    """Set TCP's congestion control for all connections over the interface's routes.

    The host's default would decide how fast a lossy link is. A route needs neither a writable ``/proc/sys`` nor the
    host's permission for the algorithm, as a default of the namespace or a socket option would.
    """
    index = socket.if_nametoindex(name)
    with _netlink(f"setting TCP's congestion control on {name}") as route:
        for held in list(route.get_routes(family=socket.AF_INET, table=_MAIN_TABLE, oif=index)):
            length = held["dst_len"]
            settings = {"proto": held["proto"], "scope": held["scope"], "metrics": {"cc_algo": algorithm}}
            for key, value in (("prefsrc", held.get("prefsrc")), ("gateway", held.get("gateway"))):
                if value is not None:
                    settings[key] = value
            route.route("replace", dst=f"{held.get('dst', '0.0.0.0')}/{length}", oif=index, **settings)


def forbid_offloads(interface: str) -> None:
    """Make the interface carry packets as the wire would, so that loss and queues count real packets.

    Raises HostError when one of the offloads stays on.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for name, (read, write) in _OFFLOADS.items():
            _ethtool(control, interface, write, 0)
            if _ethtool(control, interface, read, 0) != 0:
                raise HostError(f"{name} of {interface} cannot be switched off")


def _ethtool(control: socket.socket, interface: str, request: int, value: int) -> int:
    data = array.array("B", struct.pack("II", request, value))
    address, _ = data.buffer_info()
    try:
        fcntl.ioctl(control, _SIOCETHTOOL, struct.pack("16sP8x", interface.encode(), address))
    except OSError as error:
        raise HostError(f"ethtool request {request:#x} on {interface} failed: {error.strerror}") from error
    return int(struct.unpack("II", data.tobytes())[1])
