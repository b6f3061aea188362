"""``python -m tests.helpers.ssh_server ADDRESS KEYS PID``: an ssh server for root's commands and forwarded sockets.

It stands for the sshd of a host. ``KEYS/id`` is its key, and it accepts only ``KEYS/id.pub``. As soon as it listens, it
writes its process id to the file ``PID``.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import asyncssh


class _Server(asyncssh.SSHServer):
    def unix_connection_requested(self, dest_path: str) -> bool:
        return True


async def _run(session: asyncssh.SSHServerProcess[Any]) -> None:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_shell(
        session.command or "sh", stdin=pipe, stdout=pipe, stderr=pipe
    )
    await session.redirect(stdin=child.stdin, stdout=child.stdout, stderr=child.stderr)
    session.exit(await child.wait())


async def _serve(address: str, keys: str, pid: str) -> None:
    await asyncssh.listen(
        address,
        22,
        server_factory=_Server,
        server_host_keys=[f"{keys}/id"],
        authorized_client_keys=f"{keys}/id.pub",
        process_factory=_run,
        encoding=None,
        gss_host=None,  # avoids a name lookup, which may time out in the namespace
    )
    Path(pid).write_text(str(os.getpid()))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
