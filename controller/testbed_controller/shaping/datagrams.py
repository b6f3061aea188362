"""The number of datagrams that the kernel dropped because a socket's buffer was full."""

from __future__ import annotations

from testbed_controller.shaping.namespaces import read_proc


def count_unread_datagrams() -> int:
    """Return the number of UDP datagrams dropped at full sockets since the calling thread's namespace was created."""
    return parse_unread_datagrams(read_proc("snmp"))


def parse_unread_datagrams(counters: str) -> int:
    """Return the number of dropped UDP datagrams in ``/proc/net/snmp``; 0 if the kernel does not count them.

    The file has two lines for each protocol: names, then values.

    >>> parse_unread_datagrams("Udp: InDatagrams RcvbufErrors\\nUdp: 120 7\\n")
    7
    """
    lines = []
    for line in counters.splitlines():
        # The colon excludes the lines of "UdpLite:".
        if line.startswith("Udp: "):
            lines.append(line.split())
    names, values = lines
    return int(dict(zip(names, values, strict=True)).get("RcvbufErrors", 0))
