"""Commands for tc, the state that tc prints, and errors of failed commands."""

from __future__ import annotations

import pytest

from testbed.common.errors import HostError
from testbed_controller.shaping import namespaces, tc
from testbed_controller.shaping.plan import ACCESS_CLASS, CEILING, Access, burst
from testbed_controller.shaping.tc import Tree

TREE = Tree("eth0", 1)
LEAF = 0x10
LEAF_RATE = 5_000_000
CLASSES = """\
class htb 1:3 root rate 32Gbit ceil 32Gbit burst {top}b cburst {top}b
class htb 1:10 parent 1:3 prio 0 quantum 1514 rate 1Kbit ceil {rate} burst 1b cburst {bucket}b
"""


def print_classes(rate: str = "5Mbit", bucket: int | None = None) -> str:
    """Return the classes of a tree with one leaf, as tc prints them."""
    leaf_bucket = burst(LEAF_RATE) if bucket is None else bucket
    return CLASSES.format(top=burst(CEILING), rate=rate, bucket=leaf_bucket)


def test_tree_has_a_shared_class_with_leaves_below() -> None:
    root = TREE.root(Access(2_000_000, 50))
    assert root[0] == "qdisc replace dev eth0 root handle 1: htb default 1"
    assert "classid 1:3 htb rate 2000000bit ceil 2000000bit" in root[2]
    leaf = TREE.leaf("add", LEAF, LEAF_RATE)
    assert leaf.startswith("class add dev eth0 parent 1:3 classid 1:10 htb ")
    assert f"ceil 5000000bit cburst {burst(LEAF_RATE)}" in leaf
    assert TREE.remove(LEAF) == "class del dev eth0 classid 1:10"
    # Without a limit of the access, the shared class has the ceiling of 32 Gbit/s.
    assert TREE.change_access(None).startswith(
        f"class change dev eth0 parent 1: classid 1:{ACCESS_CLASS:x} htb rate 32"
    )


@pytest.mark.parametrize(
    ("classes", "problems"),
    [
        (print_classes(), []),
        # tc prints four digits, so that a difference of 0.1 % may be due to rounding.
        (print_classes("5005Kbit"), []),
        (
            print_classes("6Mbit"),
            ["class 1:10 has a rate of 6000000 bit/s instead of 5000000"],
        ),
        (
            print_classes(bucket=99_999),
            [f"class 1:10 has a bucket of 99999 bytes instead of {burst(LEAF_RATE)}"],
        ),
        ("", ["class 1:3 is missing", "class 1:10 is missing"]),
    ],
    ids=["equal", "rounded rate", "other rate", "other bucket", "no class"],
)
def test_kernel_state_is_compared_with_the_plan(
    classes: str, problems: list[str]
) -> None:
    assert TREE.differences(classes, None, [(LEAF, LEAF_RATE)]) == problems


def test_one_batch_changes_and_reads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], str, dict[str, str] | None]] = []

    def record_command(
        arguments: list[str], text: str, environment: dict[str, str] | None
    ) -> str:
        calls.append((arguments, text, environment))
        # tc prints classes as text even with -j, between the JSON lists of queues and filters.
        return 'class htb 1:3 root\n[{"kind": "htb"}]\n[{"pref": 1}]\n[]\nclass htb 2:3 root\n'

    monkeypatch.setattr(tc, "command", record_command)
    state = tc.run_batch(
        ["a change"],
        ["eth0", "ifb0"],
        [("eth0", "1:"), ("ifb0", "2:")],
        tables="/tables",
    )
    assert state.classes == "class htb 1:3 root\nclass htb 2:3 root"
    assert state.qdiscs == [{"kind": "htb"}]
    assert state.filters == [[{"pref": 1}], []]
    ((arguments, text, environment),) = calls
    assert arguments == ["tc", "-j", "-batch", "-"]
    assert text.splitlines() == [
        "a change",
        "class show dev eth0",
        "class show dev ifb0",
        "qdisc show",
        "filter show dev eth0 parent 1:",
        "filter show dev ifb0 parent 2:",
    ]
    assert environment is not None
    assert environment["TC_LIB_DIR"] == "/tables"


def test_failed_command_is_reported_with_input_line() -> None:
    assert namespaces.command(["cat"], "text") == "text"
    # `Command failed -:2` is tc's message for the second line of a batch on standard input.
    with pytest.raises(
        HostError, match=r"'sh -c .*' failed: Command failed -:2 \(the second\)"
    ):
        namespaces.command(
            ["sh", "-c", "echo 'Command failed -:2' >&2; exit 1"],
            "the first\nthe second\n",
        )
    # The input has no line 9 to quote.
    with pytest.raises(HostError, match=r"failed: Command failed -:9$"):
        namespaces.command(
            ["sh", "-c", "echo 'Command failed -:9' >&2; exit 1"], "the first\n"
        )
    with pytest.raises(
        HostError, match="'no-such-program' is not installed in the shaper"
    ):
        namespaces.command(["no-such-program"])


def test_namespace_of_an_ended_process_is_refused() -> None:
    # Linux assigns process ids up to 2^22, so that this process cannot exist.
    with pytest.raises(
        HostError, match="cannot open the network namespace of process 999999999"
    ):
        namespaces.Namespace.of_process(999_999_999)


def test_error_inside_a_namespace_reaches_the_caller() -> None:
    def fail() -> None:
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        namespaces._in_thread(fail)
    assert namespaces._in_thread(lambda: 3) == 3
