"""The gate of an applier on a kernel without netfilter queues."""

from __future__ import annotations

import pytest

from testbed.common.errors import HostError
from testbed_controller.shaping import applier
from testbed_controller.shaping.applier import Applier
from testbed_controller.shaping.backend import Backend


class PlainBackend(Backend):
    """A backend that needs no kernel support."""

    name = "plain"


def fail_without_queues() -> str:
    raise HostError("no queues")


def test_radio_cell_without_gate_is_refused_also_after_a_slow_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(applier, "choose_backend", lambda *_: (PlainBackend(), {}))
    monkeypatch.setattr(applier, "queueing_iptables", fail_without_queues)
    plain_applier = Applier("plain", lambda: 0)
    # Slow links do without a gate.
    assert not plain_applier.ensure_gate(required=False)
    assert plain_applier.facts()["gate"] == "no queues"
    for _ in range(2):
        with pytest.raises(HostError, match=r"a radio cell needs .*: no queues"):
            plain_applier.ensure_gate(required=True)
