"""Network interfaces in the calling thread's namespace: look-up, creation and configuration over netlink.

Trees of ``tc`` are written as ``tc`` commands instead (`sender.py`, `netem.py`), which are easier to read and compare.
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
"""linux/sockios.h: request for settings of a network card."""
_LINK_SCOPE = 253
"""linux/rtnetlink.h: scope of routes to directly reachable addresses (RT_SCOPE_LINK)."""
_MAIN_TABLE = 254
"""linux/rtnetlink.h: the default routing table (RT_TABLE_MAIN)."""
_OF_BRIDGE = 4
"""linux/neighbour.h: an address in the table of the port's bridge (NTF_MASTER)."""
_STATIC = 0x40
"""linux/neighbour.h: a static address, which needs no ARP (NUD_NOARP)."""
_NO_ADDRESS = 1
"""linux/if_link.h: no automatic IPv6 addresses (IN6_ADDR_GEN_MODE_NONE)."""
# linux/ethtool.h: (get, set) requests of each offload, by which the kernel passes packets on as larger ones.
_OFFLOADS = {"tso": (0x1E, 0x1F), "gso": (0x23, 0x24), "gro": (0x2B, 0x2C)}


@dataclass(frozen=True)
class Interface:
    """The interface with a device's data address."""

    name: str
    broadcast: str | None
    """Broadcast address; None without one."""


@contextlib.contextmanager
def _netlink(purpose: str) -> Iterator[Any]:
    """Open a netlink connection; an error becomes a HostError naming the purpose."""
    try:
        with IPRoute() as route:
            yield route
    except (NetlinkError, OSError) as error:
        raise HostError(f"{purpose} failed: {error}") from error


def interface_of(address: str) -> Interface | None:
    """Return the interface with an IPv4 address; None without one."""
    with _netlink("looking up the addresses of interfaces") as route:
        for entry in route.get_addr(family=socket.AF_INET):
            if entry.get("local") == address:
                return Interface(entry.get("label"), entry.get("broadcast"))
    return None


def interface_names() -> set[str]:
    """Return the names of all interfaces."""
    with _netlink("listing interfaces") as route:
        return {link.get("ifname") for link in route.get_links()}


def make_bridge(name: str) -> None:
    """Create a bridge without an address; raises HostError if the kernel lacks bridges."""
    with _netlink(f"adding the bridge {name}") as route:
        # Without snooping, multicasts go to all ports; no device announces memberships.
        route.link("add", ifname=name, kind="bridge", br_mcast_snooping=0)
        _bring_up(route, name)


def plug_port(
    port: str, bridge: str, interface: str, hardware: str, namespace: int
) -> None:
    """Create a bridge port in this namespace, joined to a new interface in another network namespace.

    ``hardware`` is the hardware address of the interface, ``namespace`` a file descriptor of its namespace.
    """
    with _netlink(f"adding the port {port}") as route:
        route.link(
            "add",
            ifname=port,
            kind="veth",
            peer={"ifname": interface, "net_ns_fd": namespace, "address": hardware},
        )
        _bring_up(route, port, master=socket.if_nametoindex(bridge))
        # A bridge sends frames to all ports until it has learned the address.
        index = socket.if_nametoindex(port)
        entry = {"lladdr": hardware, "flags": _OF_BRIDGE, "state": _STATIC}
        route.fdb("add", ifindex=index, **entry)


def set_neighbours(name: str, hardware: Mapping[str, str]) -> None:
    """Add permanent entries to the neighbour table of an interface: hardware addresses by IPv4 address.

    Permanent entries need no ARP and do not count against the neighbour table's limit, which all namespaces of the
    kernel share: 40 devices that all know each other would fill the table.
    """
    batch = ""
    for address, neighbour in hardware.items():
        batch += (
            f"neigh replace {address} lladdr {neighbour} nud permanent dev {name}\n"
        )
    if batch:
        command(["ip", "-batch", "-"], batch)


def set_address(name: str, address: str, network: IPv4Network) -> None:
    """Set the address of an interface and activate the interface."""
    with _netlink(f"setting the address of {name}") as route:
        route.addr(
            "add",
            index=socket.if_nametoindex(name),
            address=address,
            prefixlen=network.prefixlen,
            broadcast=str(network.broadcast_address),
            label=name,
        )
        _bring_up(route, name)


def _bring_up(route: Any, name: str, **settings: Any) -> None:
    """Bring an interface up without an IPv6 address, since links do not shape IPv6."""
    index = socket.if_nametoindex(name)
    # A kernel without IPv6 refuses the attribute.
    if Path("/proc/thread-self/net/if_inet6").exists():
        mode = {"attrs": [["IFLA_INET6_ADDR_GEN_MODE", _NO_ADDRESS]]}
        route.link("set", index=index, IFLA_AF_SPEC={"attrs": [["AF_INET6", mode]]})
    route.link("set", index=index, state="up", **settings)


def add_ifb(name: str) -> None:
    """Create an intermediate device for redirected packets; raises HostError if the kernel lacks the module ifb."""
    with _netlink(
        f"adding the intermediate device {name} (kernel module ifb)"
    ) as route:
        route.link("add", ifname=name, kind="ifb")
        route.link("set", ifname=name, state="up")


def delete_interface(name: str) -> None:
    """Delete an interface; raises HostError if none has the name."""
    with _netlink(f"removing the interface {name}") as route:
        route.link("del", ifname=name)


def limit_segments(name: str, segments: int) -> None:
    """Limit the number of packets that TCP passes down in one piece, since a queue sends a piece at once."""
    with _netlink(f"setting gso_max_segs of {name}") as route:
        route.link("set", index=socket.if_nametoindex(name), gso_max_segs=segments)


def segments_of(name: str) -> int:
    """Return the maximum number of packets that TCP passes down in one piece."""
    with _netlink(f"looking up {name}") as route:
        [link] = route.get_links(socket.if_nametoindex(name))
        return int(link.get("gso_max_segs"))


def route_by_default(name: str) -> None:
    """Make the interface the default route, also for multicast, in place of the existing one."""
    with _netlink(f"making {name} the default route") as route:
        # Without a gateway, packets for addresses outside the network find no neighbour and are dropped.
        route.route(
            "replace",
            dst="0.0.0.0/0",
            oif=socket.if_nametoindex(name),
            scope=_LINK_SCOPE,
        )


def set_congestion_control(name: str, algorithm: str) -> None:
    """Set TCP's congestion control for all connections over the interface's routes.

    Otherwise the host's default would determine the throughput of a lossy link. Unlike a namespace default or a socket
    option, a route needs neither a writable ``/proc/sys`` nor the host's permission for the algorithm.
    """
    index = socket.if_nametoindex(name)
    with _netlink(f"setting TCP's congestion control on {name}") as route:
        # Read completely before the first change, since answers and requests share a socket.
        entries = list(
            route.get_routes(family=socket.AF_INET, table=_MAIN_TABLE, oif=index)
        )
        for entry in entries:
            # A route cannot be changed in part: all other properties are repeated.
            settings = {
                "proto": entry["proto"],
                "scope": entry["scope"],
                "metrics": {"cc_algo": algorithm},
            }
            for key in ("prefsrc", "gateway"):
                value = entry.get(key)
                if value is not None:
                    settings[key] = value
            destination = f"{entry.get('dst', '0.0.0.0')}/{entry['dst_len']}"
            route.route("replace", dst=destination, oif=index, **settings)


def forbid_offloads(interface: str) -> None:
    """Disable offloads, so that losses and queues apply to packets as on the wire.

    Raises HostError if an offload stays enabled.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for name, (get_request, set_request) in _OFFLOADS.items():
            _ethtool(control, interface, set_request, 0)
            # Some drivers accept the request and keep the offload.
            if _ethtool(control, interface, get_request, 0) != 0:
                raise HostError(f"cannot disable {name} of {interface}")


def _ethtool(control: socket.socket, interface: str, request: int, value: int) -> int:
    """Send a request about an interface with a value; return the value after the request."""
    # The request has a pointer to the value (struct ethtool_value), which the kernel changes in place.
    data = array.array("B", struct.pack("II", request, value))
    address, _ = data.buffer_info()
    pointer = struct.pack("16sP8x", interface.encode(), address)
    try:
        fcntl.ioctl(control, _SIOCETHTOOL, pointer)
    except OSError as error:
        raise HostError(
            f"ethtool request {request:#x} on {interface} failed: {error.strerror}"
        ) from error
    return int(struct.unpack("II", data.tobytes())[1])
