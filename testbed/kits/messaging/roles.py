"""What every device does for its coordinator: answer it, and have the role that it is given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.messaging.membership import Configured, Presence, Status
from testbed.kits.messaging.typed import Typed

R = TypeVar("R", bound="Role")


class Role(Protocol):
    """What a device is in one configuration, such as a stage."""

    @property
    def actions(self) -> int:
        """Pieces of work done: rises as long as it gets on."""

    @property
    def computing(self) -> bool:
        """Whether the device computes for it right now."""

    async def prepare(self) -> None:
        """Get ready, by loading weights for example."""

    async def serve(self) -> None:
        """Do the role's work until cancelled."""


class RoleHolder:
    """One device from the start of its program on; knows nothing from before.

    A configuration higher than its own ends its role, whatever message brings it: the coordinator has given that up.
    """

    def __init__(
        self, mailbox: Mailbox, coordinator: str, status: Callable[[Status], Status] = lambda status: status
    ) -> None:
        """``status`` may add to what the device says of itself when it is asked."""
        self.role: Role | None = None
        self.presence = Presence(mailbox, coordinator, lambda: status(self._status()))
        self._mailbox = mailbox
        self._coordinator = coordinator
        mailbox.on_open(self._end)

    def follow(self, configure: type[Typed], role_of: Callable[[Any], Role]) -> None:
        """Have the roles that messages of this kind bring, each as soon as it arrives.

        The kind has a field ``configuration`` and opens it.
        """

        def take(message: Any) -> None:
            if self.assume(message.configuration, lambda: role_of(message)):
                self._mailbox.start_in_configuration(self._serve(announce=True))

        self._mailbox.on(configure, take)

    def assume(self, configuration: int, role_of: Callable[[], Role]) -> bool:
        """Have a role from now on, unless there is one already or the configuration is over; say whether so."""
        self._mailbox.open(configuration)
        if self.role is not None or configuration < self._mailbox.configuration:
            return False
        self.role = role_of()
        return True

    def begin(self) -> None:
        """Do the role's work until the configuration ends."""
        self._mailbox.start_in_configuration(self._serve())

    def ready(self) -> None:
        """Tell the coordinator that this device is ready for its role."""
        configured = Configured(self._mailbox.configuration, self.presence.incarnation)
        self._mailbox.post(self._coordinator, configured)

    async def serve(self) -> None:
        """Be there for the coordinator until cancelled: the program of every other device."""
        self.presence.greet()
        await asyncio.get_running_loop().create_future()

    async def _serve(self, announce: bool = False) -> None:
        assert self.role is not None
        role = self.role
        await role.prepare()
        if announce:
            self.ready()
        await role.serve()

    def _end(self) -> None:
        self.role = None

    def _status(self) -> Status:
        role = self.role
        if role is None:
            return Status()
        return Status(self._mailbox.configuration, role.actions, role.computing)
