"""Properties of random sequences of fault actions: reversibility, and agreement of a fault target with the state."""

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.faults.conditions import StateDiff, SystemState, apply_step
from testbed.faults.parts import ActionPart
from testbed.faults.script import FaultOperation
from testbed.hardware import DeviceSpec
from testbed.network.link import Link

NAMES = "abcd"
INITIAL = SystemState.of(
    [DeviceSpec(name, 1e9, 1e9) for name in NAMES],
    dict.fromkeys(permutations(NAMES, 2), Link(rate=50e6, delay=0.005, loss=0.0)),
)
MAX_ACTIONS = 12

device_names = st.sampled_from(NAMES)
link_sets = st.one_of(
    device_names.map(lambda name: {"device": name}),
    st.permutations(NAMES).map(lambda order: {"between": order[:2]}),
    st.permutations(NAMES).map(lambda order: {"from": order[0], "to": order[1]}),
)
link_properties = st.sampled_from(
    [
        {"rate": "1mbit"},
        {"delay": "50ms"},
        {"loss": "1%", "rate": "2mbit"},
        {"preset": "4g"},
    ]
)
device_groups = st.lists(device_names, min_size=1, max_size=3, unique=True)
fault_keys = st.one_of(
    device_names.map(lambda name: {"kill": name}),
    device_names.map(lambda name: {"pause": name}),
    device_groups.map(lambda group: {"partition": [group]}),
    st.builds(
        lambda links, properties: {"degrade": {**links, **properties}},
        link_sets,
        link_properties,
    ),
    link_sets.map(lambda links: {"flap": {**links, "down": "1s", "up": "1s"}}),
    device_names.map(lambda name: {"throttle": {"device": name, "slowdown": 3}}),
    device_names.map(lambda name: {"throttle": {"device": name, "speed": "10mflops"}}),
)
repair_keys = st.one_of(
    st.just({"heal": "all"}),
    device_names.map(lambda name: {"restart": name}),
    device_names.map(lambda name: {"retire": name}),
    device_names.map(lambda name: {"join": name}),
    device_names.map(lambda name: {"resume": name}),
    device_names.map(lambda name: {"unthrottle": name}),
)


@st.composite
def operation_sequences(draw):
    """Draw operations in order of time; each fault is undone once, not before the fault itself."""
    actions = draw(st.lists(st.one_of(fault_keys, repair_keys), max_size=MAX_ACTIONS))
    timed_operations = []
    for index, keys in enumerate(actions):
        action = ActionPart.model_validate(keys).action
        handle = f"{index}"
        if not action.undoes:
            undo_time = draw(st.floats(index, 20))
            timed_operations.append((undo_time, FaultOperation(action, handle, "undo")))
        timed_operations.append((index, FaultOperation(action, handle)))
    # A fault may be undone at the time of its strike, which comes first then.
    timed_operations.sort(key=lambda timed: (timed[0], timed[1].phase == "undo"))
    return [operation for _, operation in timed_operations]


@settings(max_examples=200, deadline=None)
@given(operation_sequences())
def test_undoing_every_fault_restores_initial_state(operations):
    now = INITIAL
    for operation in operations:
        now = operation.apply(now)
    assert now == INITIAL
    assert now.diff_since(INITIAL) == StateDiff()


class RecordingTarget:
    """Fault target with stored device states, links and speeds, and with checks of locks and transitions."""

    def __init__(self) -> None:
        self.current = INITIAL
        self.devices = dict(INITIAL.devices)
        self.links = dict(INITIAL.links)
        self.speed_factors = dict.fromkeys(NAMES, 1.0)
        self.is_locked = False

    def states(self):
        return dict(self.devices)

    def lock(self):
        return self

    def __enter__(self):
        self.is_locked = True

    def __exit__(self, *_):
        self.is_locked = False

    def apply(self, now, changed):
        assert self.is_locked
        self.current = now
        self.links |= changed.links
        self.speed_factors |= changed.speeds

    def switch_device(self, device, allowed_states, new_state):
        # A boot takes long in containers, so that others must be able to change links meanwhile.
        assert not self.is_locked
        # Only changes of the state reach a target: no device is paused twice, for example.
        assert self.devices[device] in allowed_states
        self.devices[device] = new_state

    def kill(self, device):
        self.switch_device(device, ("up", "paused"), "down")

    def retire(self, device):
        self.switch_device(device, ("up",), "retired")

    def restart(self, device):
        self.switch_device(device, ("down", "retired"), "up")

    def pause(self, device):
        self.switch_device(device, ("up",), "paused")

    def resume(self, device):
        self.switch_device(device, ("paused",), "up")


@settings(max_examples=200, deadline=None)
@given(operation_sequences(), st.integers(0, 2 * MAX_ACTIONS))
def test_fault_target_follows_state_of_operations(operations, length):
    # The first operations alone, so that faults are still in force at the end.
    target, now = RecordingTarget(), INITIAL
    for operation in operations[:length]:
        apply_step(operation, target)
        now = operation.apply(now)
        assert target.devices == now.devices
        assert target.links == {pair: now.link(pair) for pair in now.links}
        for device in now.devices:
            assert target.speed_factors[device] == now.speed_factor(device)
