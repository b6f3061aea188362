"""What every part of a scenario refuses, whatever it is about."""

import pytest
from pydantic import Field, ValidationError

from testbed.common.part import MOST, ConfigModel
from testbed.common.quantities import Duration, Rate


class Example(ConfigModel):
    count: int = 1
    share: float | None = None
    named: str | bool = "x"
    bounded: float = Field(0.0, le=1e15)
    rate: Rate | None = None
    pair: tuple[float, float] = (0.0, 0.0)
    wait: Duration = 0.0


def problem(**keys):
    with pytest.raises(ValidationError) as raised:
        Example(**keys)
    (error,) = raised.value.errors()
    return error["type"]


@pytest.mark.parametrize("key", ["count", "share"])
@pytest.mark.parametrize("value", [True, "1_000"])
def test_neither_true_nor_text_with_underscores_is_a_number(key, value):
    assert problem(**{key: value}) == ("int_type" if key == "count" else "float_type")


def test_booleans_and_underscores_are_valid_outside_of_numbers():
    assert Example(named=True).named is True
    assert Example(named="a_b").named == "a_b"


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_numbers_are_finite(value):
    assert problem(share=value) == "finite_number"


def test_numbers_are_bounded_by_default():
    assert problem(count=MOST + 1) == "less_than_equal"
    assert problem(share=-2.0 * MOST) == "greater_than_equal"
    assert problem(pair=(0.0, 2.0 * MOST)) == "less_than_equal"
    assert Example(count=MOST, bounded=10.0 * MOST).bounded == 10.0 * MOST
    assert Example(rate="5000gbit").rate == 5e12


def test_unknown_keys_and_changes_are_refused():
    assert problem(unknown=1) == "extra_forbidden"
    with pytest.raises(ValidationError, match="frozen"):
        Example().count = 2


def test_schema_contains_bounds_of_all_plain_numbers():
    described = Example.model_json_schema()["properties"]
    assert (described["count"]["minimum"], described["count"]["maximum"]) == (
        -MOST,
        MOST,
    )
    assert (
        described["bounded"] | {"maximum": 1e15, "minimum": -MOST}
        == described["bounded"]
    )
    number, nothing = described["share"]["anyOf"]
    assert number["maximum"] == MOST
    assert "maximum" not in nothing
    assert [item["maximum"] for item in described["pair"]["prefixItems"]] == [
        MOST,
        MOST,
    ]
    assert "maximum" not in str(described["wait"])
