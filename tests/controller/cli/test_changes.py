"""Options made from the keys of a part of a scenario."""

from __future__ import annotations

from typing import Annotated, Literal

import click
import pytest
from click.testing import CliRunner
from pydantic import Field

from testbed.common.errors import InputError
from testbed.common.part import ConfigModel
from testbed.common.quantities import Duration
from testbed_controller.cli.changes import options_of, part_of


class Inner(ConfigModel):
    p: float = 0.0


class Outer(ConfigModel):
    number: int = Field(description="of `things`")
    share: float | None = Field(None, description="between", examples=[0.5])
    long_name: Duration | None = Field(None, description="how long")
    kind: Literal["one", "two"] = Field("one", description="which")
    inner: Annotated[Inner | None, Field(description="more")] = None
    hidden: str = "x"


def given(*arguments: str) -> dict[str, object]:
    """Return what a command with these options is called with."""
    seen: dict[str, object] = {}
    command = click.Command(
        "try",
        params=options_of(Outer, {"hidden"}),
        callback=lambda **keys: seen.update(keys),
    )
    result = CliRunner().invoke(command, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return seen or {"output": result.output, "status": result.exit_code}


def test_each_key_is_an_option_of_its_kind() -> None:
    found = given(
        "--number",
        "3",
        "--share",
        "0.5",
        "--long-name",
        "2ms",
        "--kind",
        "two",
        "--inner",
        "p=1%,on-time=2s",
    )
    assert found == {
        "number": 3,
        "share": 0.5,
        "long_name": "2ms",
        "kind": "two",
        "inner": {"p": "1%", "on_time": "2s"},
    }


def test_what_is_not_given_is_none_and_what_a_part_requires_is_required() -> None:
    assert given("--number", "3") == {
        "number": 3,
        "share": None,
        "long_name": None,
        "kind": None,
        "inner": None,
    }
    assert "Missing option '--number'" in str(given()["output"])


@pytest.mark.parametrize(
    "wrong",
    [("--number", "3.5"), ("--share", "half"), ("--kind", "three"), ("--hidden", "y")],
)
def test_values_of_another_kind_and_keys_that_are_left_out_are_refused(
    wrong: tuple[str, str],
) -> None:
    assert given("--number", "3", *wrong)["status"] == 2


def test_a_part_in_a_part_needs_keys_and_values() -> None:
    with pytest.raises(InputError, match="'p' must be a list such as p=1%,r=20%"):
        given("--number", "3", "--inner", "p")
    assert part_of(Outer.model_fields["inner"]) is Inner
    assert part_of(Outer.model_fields["number"]) is None


def test_help_is_the_description_with_an_example_where_it_has_none() -> None:
    helps = {option.name: option.help for option in options_of(Outer)}  # type: ignore[attr-defined]
    assert helps["number"] == "Of things"
    assert helps["share"] == "Between, e.g. 0.5"
    assert str(helps["long_name"]).startswith("How long, e.g. ")
