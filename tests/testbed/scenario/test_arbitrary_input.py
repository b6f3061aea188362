"""Arbitrary files and overrides are loaded or rejected with an `InputError`, never with another exception."""

from __future__ import annotations

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testbed.common.errors import InputError
from testbed.scenario.loading import load
from tests.testbed.scenario.loading_scenario import VALID


def assert_loads_or_is_rejected(path: str) -> None:
    """Load a scenario; any exception but an InputError whose lines all name the file fails the test."""
    message = None
    try:
        load(path)
    except InputError as error:
        message = str(error)
    if message is not None:
        for line in message.split("\n"):
            assert line.startswith("small.yaml")


# The fixture `write_scenario` overwrites its file, so that examples may share it.
relaxed = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


@relaxed
@given(
    st.one_of(
        st.binary(max_size=200),
        st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")),
    )
)
def test_arbitrary_content_is_rejected_or_loaded(write_scenario, content):
    assert_loads_or_is_rejected(write_scenario(content))


KEYS = st.sampled_from(
    [
        "name",
        "devices",
        "network",
        "link",
        "workload",
        "faults",
        "kill",
        "when",
        "sweep",
        "expect",
        "between",
        "x",
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["5ms", "1%", "a", ""])
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


@relaxed
@given(key=KEYS, value=TREES)
def test_value_of_any_shape_is_rejected_or_loaded(write_scenario, key, value):
    lines = [f"{key}: {json.dumps(value)}"]
    for line in VALID.splitlines():
        if not line.startswith(f"{key}:"):
            lines.append(line)
    assert_loads_or_is_rejected(write_scenario("\n".join(lines)))


@relaxed
@given(
    key=st.sampled_from(
        [
            "network.link.rate",
            "network.links.0",
            "faults.0.for",
            "faults.0.when.batch",
            "sweep",
            "expect.x",
            "a..b",
            "0",
            ".",
        ]
    ),
    value=st.text(max_size=12),
)
def test_any_override_is_applied_or_rejected(write_scenario, key, value):
    message = None
    try:
        load(write_scenario(VALID), [f"{key}={value}"])
    except InputError as error:
        message = str(error)
    if message is not None:
        assert message.startswith(("--set", "small.yaml"))


@relaxed
@given(
    position=st.integers(0, len(VALID) - 1),
    length=st.integers(0, 9),
    new=st.text(max_size=6),
)
def test_damaged_file_is_rejected_or_loaded(write_scenario, position, length, new):
    damaged = VALID[:position] + new + VALID[position + length :]
    assert_loads_or_is_rejected(write_scenario(damaged))
