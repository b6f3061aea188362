"""Command line options generated from the keys of a part of a scenario."""

from __future__ import annotations

from typing import Annotated, Literal

import click
import pytest
from click.testing import CliRunner
from pydantic import Field

from testbed.common.errors import InputError
from testbed.common.part import ConfigModel
from testbed.common.quantities import Duration
from testbed_controller.cli.changes import options_of, section_class


class Inner(ConfigModel):
    p: float = 0.0


class Outer(ConfigModel):
    number: int = Field(description="of `things`")
    share: float | None = Field(None, description="between", examples=[0.5])
    long_name: Duration | None = Field(None, description="how long")
    kind: Literal["one", "two"] = Field("one", description="which")
    inner: Annotated[Inner | None, Field(description="more")] = None
    hidden: str = "x"


def parse_options(*arguments: str) -> dict[str, object]:
    """Return the parsed options of `Outer`, or ``output`` and ``status`` of a usage error."""
    values: dict[str, object] = {}
    command = click.Command(
        "try",
        params=options_of(Outer, {"hidden"}),
        callback=lambda **keys: values.update(keys),
    )
    result = CliRunner().invoke(command, arguments)
    # click reports usage errors by SystemExit.
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return values or {"output": result.output, "status": result.exit_code}


def test_each_key_is_option_of_its_type() -> None:
    values = parse_options(
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
    # Quantities remain texts, which the scenario parses.
    assert values == {
        "number": 3,
        "share": 0.5,
        "long_name": "2ms",
        "kind": "two",
        "inner": {"p": "1%", "on_time": "2s"},
    }


def test_missing_options_are_none_unless_required() -> None:
    assert parse_options("--number", "3") == {
        "number": 3,
        "share": None,
        "long_name": None,
        "kind": None,
        "inner": None,
    }
    assert "Missing option '--number'" in str(parse_options()["output"])


@pytest.mark.parametrize(
    "wrong",
    [("--number", "3.5"), ("--share", "half"), ("--kind", "three"), ("--hidden", "y")],
)
def test_values_of_another_type_and_excluded_keys_are_refused(
    wrong: tuple[str, str],
) -> None:
    # 2 is click's status of usage errors.
    assert parse_options("--number", "3", *wrong)["status"] == 2


def test_nested_part_needs_keys_and_values() -> None:
    with pytest.raises(InputError, match="'p' must be a list such as p=1%,r=20%"):
        parse_options("--number", "3", "--inner", "p")
    assert section_class(Outer.model_fields["inner"]) is Inner
    assert section_class(Outer.model_fields["number"]) is None


def test_help_is_description_with_example() -> None:
    helps = {option.name: option.help for option in options_of(Outer)}  # type: ignore[attr-defined]
    assert helps["number"] == "Of things"
    assert helps["share"] == "Between, e.g. 0.5"
    # The field has no example, but the type of durations has one.
    assert str(helps["long_name"]).startswith("How long, e.g. ")
