"""The loop around a method's work: what is tried again, who is left out, and when it is given up."""

import asyncio
from types import SimpleNamespace

import pytest

from testbed.common.errors import TestbedError
from testbed.kits.messaging.recovery import MAX_RETRIES, MAX_RETRIES_WITH_LOST, run_with_recovery
from testbed.kits.messaging.supervision import Lost


class Plan:
    """A work and a recovery that note what is asked of them; each run of the work ends as the next outcome says."""

    start = 5

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.calls = []
        self.excluded = set()
        self.supervisor = SimpleNamespace(
            progress=0,
            stages=[],
            device=SimpleNamespace(record=lambda event, **fields: self.calls.append(fields["phase"])),
            membership=SimpleNamespace(exclude=self.excluded.update),
        )

    async def run(self):
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if isinstance(outcome, int):
            self.supervisor.progress += outcome
            outcome = self.outcomes.pop(0)
        if outcome is not None:
            raise outcome

    async def establish(self):
        self.calls.append("establish")

    async def recover(self, lost, start):
        self.calls.append(("recover", lost.missing, start))

    def run_with_recovery(self):
        asyncio.run(run_with_recovery(self, self, self.supervisor))


def test_work_goes_on_after_a_loss():
    plan = Plan(Lost(["one"]))
    plan.run_with_recovery()
    assert plan.calls == ["establish", ("recover", ["one"], 5), "establish", "resumed"]
    assert not plan.excluded


def test_devices_cut_off_are_left_out():
    plan = Plan(Lost(["one", "two"], ["two"]))
    plan.run_with_recovery()
    assert plan.excluded == {"two"}


def test_device_lost_again_and_again_is_left_out_though_it_answers():
    plan = Plan(*(Lost(["one"]) for _ in range(MAX_RETRIES_WITH_LOST)))
    plan.run_with_recovery()
    assert plan.excluded == {"one"}


def test_without_progress_it_is_given_up():
    plan = Plan(*(Lost(["one"]) for _ in range(MAX_RETRIES)))
    with pytest.raises(TestbedError, match=r"20 recoveries in a row .* the last for one: .*raise method.patience"):
        plan.run_with_recovery()


def test_progress_in_between_counts():
    outcomes = [outcome for _ in range(2 * MAX_RETRIES) for outcome in (1, Lost(["one"]))]
    plan = Plan(*outcomes)
    plan.run_with_recovery()
    assert not plan.excluded
