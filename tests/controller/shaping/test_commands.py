"""What is said to `tc` and read back from it, and what of a command that fails is told."""

from __future__ import annotations

import pytest

from testbed.common.errors import HostError
from testbed_controller.shaping import namespaces, tc
from testbed_controller.shaping.plan import ACCESS_CLASS, CEILING, Access, burst
from testbed_controller.shaping.tc import Tree

TREE = Tree("eth0", 1)
SHOWN = """\
class htb 1:3 root rate 32Gbit ceil 32Gbit burst {top}b cburst {top}b
class htb 1:10 parent 1:3 prio 0 quantum 1514 rate 1Kbit ceil {rate} burst 1b cburst {bucket}b
"""


def shown(rate: str = "5Mbit", bucket: int | None = None) -> str:
    return SHOWN.format(
        top=burst(CEILING),
        rate=rate,
        bucket=burst(5_000_000) if bucket is None else bucket,
    )


def test_a_tree_is_written_with_its_shared_class_and_leaves_below_it() -> None:
    root = TREE.root(Access(2_000_000, 50))
    assert root[0] == "qdisc replace dev eth0 root handle 1: htb default 1"
    assert "classid 1:3 htb rate 2000000bit ceil 2000000bit" in root[2]
    leaf = TREE.leaf("add", 0x10, 5_000_000)
    assert leaf.startswith("class add dev eth0 parent 1:3 classid 1:10 htb ")
    assert f"ceil 5000000bit cburst {burst(5_000_000)}" in leaf
    assert TREE.remove(0x10) == "class del dev eth0 classid 1:10"
    assert TREE.change_access(None).startswith(
        f"class change dev eth0 parent 1: classid 1:{ACCESS_CLASS:x} htb rate 32"
    )


@pytest.mark.parametrize(
    ("held", "problems"),
    [
        (shown(), []),
        (shown("5005Kbit"), []),  # as near as tc prints
        (shown("6Mbit"), ["class 1:10 has a rate of 6000000 bit/s instead of 5000000"]),
        (
            shown(bucket=99_999),
            [f"class 1:10 has a bucket of 99999 bytes instead of {burst(5_000_000)}"],
        ),
        ("", ["class 1:3 is missing", "class 1:10 is missing"]),
    ],
)
def test_kernel_state_is_compared_with_the_plan(held: str, problems: list[str]) -> None:
    assert TREE.differences(held, None, [(0x10, 5_000_000)]) == problems


def test_one_batch_changes_and_reads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], str, dict[str, str] | None]] = []

    def answer(
        arguments: list[str], text: str, environment: dict[str, str] | None
    ) -> str:
        asked.append((arguments, text, environment))
        return 'class htb 1:3 root\n[{"kind": "htb"}]\n[{"pref": 1}]\n[]\nclass htb 2:3 root\n'

    monkeypatch.setattr(tc, "command", answer)
    found = tc.run_batch(
        ["a change"],
        ["eth0", "ifb0"],
        [("eth0", "1:"), ("ifb0", "2:")],
        tables="/tables",
    )
    assert found.classes == "class htb 1:3 root\nclass htb 2:3 root"
    assert (found.qdiscs, found.filters) == ([{"kind": "htb"}], [[{"pref": 1}], []])
    ((arguments, text, environment),) = asked
    assert arguments == ["tc", "-j", "-batch", "-"]
    assert text.splitlines() == [
        *("a change", "class show dev eth0", "class show dev ifb0", "qdisc show"),
        *("filter show dev eth0 parent 1:", "filter show dev ifb0 parent 2:"),
    ]
    assert environment is not None
    assert environment["TC_LIB_DIR"] == "/tables"


def test_a_command_that_fails_is_named_with_its_line() -> None:
    assert namespaces.command(["cat"], "text") == "text"
    with pytest.raises(
        HostError, match=r"'sh -c .*' failed: Command failed -:2 \(the second\)"
    ):
        namespaces.command(
            ["sh", "-c", "echo 'Command failed -:2' >&2; exit 1"],
            "the first\nthe second\n",
        )
    with pytest.raises(HostError, match=r"failed: Command failed -:9$"):
        namespaces.command(
            ["sh", "-c", "echo 'Command failed -:9' >&2; exit 1"], "the first\n"
        )
    with pytest.raises(
        HostError, match="'no-such-program' is not installed in the shaper"
    ):
        namespaces.command(["no-such-program"])


def test_the_namespace_of_a_process_that_is_gone_is_none() -> None:
    with pytest.raises(
        HostError, match="cannot open the network namespace of process 999999999"
    ):
        namespaces.Namespace.of_process(999_999_999)


def test_error_inside_a_namespace_reaches_the_caller() -> None:
    def bad() -> None:
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        namespaces._in_thread(bad)
    assert namespaces._in_thread(lambda: 3) == 3
