"""Validation common to all parts of a scenario file."""

import pytest
from pydantic import Field, ValidationError

from testbed.common.part import MAX_NUMBER, ConfigModel
from testbed.common.quantities import Duration, Rate


class Example(ConfigModel):
    count: int = 1
    share: float | None = None
    label: str | bool = "x"
    bounded: float = Field(0.0, le=1e15)
    rate: Rate | None = None
    pair: tuple[float, float] = (0.0, 0.0)
    wait: Duration = 0.0


def error_type(**keys):
    with pytest.raises(ValidationError) as error:
        Example(**keys)
    (problem,) = error.value.errors()
    return problem["type"]


# Pydantic reads True as 1, and "1_000" as Python does.
@pytest.mark.parametrize(
    ("key", "expected_type"), [("count", "int_type"), ("share", "float_type")]
)
@pytest.mark.parametrize("value", [True, "1_000"])
def test_boolean_or_text_is_refused_as_number(key, expected_type, value):
    assert error_type(**{key: value}) == expected_type


def test_boolean_and_underscore_are_valid_for_other_keys():
    assert Example(label=True).label is True
    assert Example(label="a_b").label == "a_b"


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinity_and_nan_are_refused(value):
    assert error_type(share=value) == "finite_number"


def test_numbers_are_bounded_by_default():
    assert error_type(count=MAX_NUMBER + 1) == "less_than_equal"
    assert error_type(share=-2.0 * MAX_NUMBER) == "greater_than_equal"
    assert error_type(pair=(0.0, 2.0 * MAX_NUMBER)) == "less_than_equal"


def test_bound_of_field_or_unit_replaces_default_bound():
    assert (
        Example(count=MAX_NUMBER, bounded=10.0 * MAX_NUMBER).bounded
        == 10.0 * MAX_NUMBER
    )
    assert Example(rate="5000gbit").rate == 5e12


def test_unknown_key_is_refused():
    assert error_type(unknown=1) == "extra_forbidden"


def test_validated_part_is_immutable():
    with pytest.raises(ValidationError, match="frozen"):
        Example().count = 2


def test_schema_contains_bounds_of_plain_numbers():
    properties = Example.model_json_schema()["properties"]
    count, bounded = properties["count"], properties["bounded"]
    assert (count["minimum"], count["maximum"]) == (-MAX_NUMBER, MAX_NUMBER)
    assert (bounded["minimum"], bounded["maximum"]) == (-MAX_NUMBER, 1e15)
    # The second alternative of an optional number is null.
    number, null = properties["share"]["anyOf"]
    assert number["maximum"] == MAX_NUMBER
    assert "maximum" not in null
    for item in properties["pair"]["prefixItems"]:
        assert item["maximum"] == MAX_NUMBER
    # A duration is a text with a unit.
    assert "maximum" not in str(properties["wait"])
