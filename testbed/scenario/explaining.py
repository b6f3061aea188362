"""Conversion of pydantic's validation errors to located diagnostics in plain words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from testbed.common.errors import Diagnostic, Key, closest, nearest
from testbed.scenario.schema import Scenario


def explain(
    error: ValidationError, model: type[BaseModel], prefix: Key = ()
) -> list[Diagnostic]:
    """Convert the errors of the scenario section at ``prefix`` to diagnostics."""
    details = error.errors(include_url=False)
    misspelt = set()
    for detail in details:
        if detail["type"] == "extra_forbidden":
            misspelt.add(_closest_key(detail["loc"], model))
    problems = []
    for detail in details:
        # A key that is merely misspelt is not missing as well.
        if detail["type"] != "missing" or detail["loc"] not in misspelt:
            problem = _to_diagnostic(detail, model)
            problems.append(Diagnostic(prefix + problem.key, problem.text))
    return problems


def _closest_key(key: Key, model: type[BaseModel]) -> Key:
    """Return the known key most similar to an unknown one."""
    close = closest(str(key[-1]), _known_keys(key[:-1], model))
    return (*key[:-1], *close)


def published_schema() -> dict[str, Any]:
    """Return the JSON schema of scenario files, as printed by `testbed show schema`."""
    schema = dict(_schema_of(Scenario))
    del schema["title"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Edge testbed scenario",
        **schema,
    }


@cache
def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        if "description" in part:
            # Examples in docstrings are Python, whereas a schema describes YAML.
            part["description"] = part["description"].partition("\n\n>>>")[0]
    return schema


def _schema_alternatives(
    schema: Mapping[str, Any], model: type[BaseModel]
) -> list[Mapping[str, Any]]:
    """Return the alternatives of one value's schema, references followed."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _schema_alternatives(_schema_of(model)["$defs"][name], model)
    choices = schema.get("anyOf") or schema.get("oneOf")
    if not choices:
        return [schema]
    alternatives: list[Mapping[str, Any]] = []
    for choice in choices:
        alternatives += _schema_alternatives(choice, model)
    return alternatives


def _describe_key(key: Key, model: type[BaseModel]) -> Mapping[str, Any]:
    """Return the JSON schema of one key; empty for an unknown key."""
    schemas: list[Mapping[str, Any]] = [_schema_of(model)]
    for part in key:
        inner = []
        for outer in schemas:
            for schema in _schema_alternatives(outer, model):
                item = _schema_of_item(schema, part)
                if isinstance(item, Mapping):
                    inner.append(item)
        schemas = inner
    return schemas[0] if schemas else {}


def _schema_of_item(schema: Mapping[str, Any], part: str | int) -> Any:
    """Return the schema of one item of a list or mapping; None, or a boolean, for an unknown item."""
    if isinstance(part, int):
        prefix: Sequence[Mapping[str, Any]] = schema.get("prefixItems", ())
        return prefix[part] if part < len(prefix) else schema.get("items")
    properties = schema.get("properties", {})
    if part in properties:
        return properties[part]
    # Mappings by a user's names have one pattern for all of them.
    for item in schema.get("patternProperties", {}).values():
        return item
    return schema.get("additionalProperties")


def _known_keys(key: Key, model: type[BaseModel]) -> list[str]:
    names: list[str] = []
    for alternative in _schema_alternatives(_describe_key(key, model), model):
        names += alternative.get("properties", {})
    return names


_NO_KEYS = frozenset({"[key]", "[keys]", "[name]"})
"""Location entries of pydantic errors that are markers instead of keys."""


def _key_of_error(detail: ErrorDetails) -> Key:
    *before, last = detail["loc"] or ("[key]",)
    key = [part for part in before if part not in _NO_KEYS]
    # An unknown key may have any name, also that of a marker.
    if detail["type"] == "extra_forbidden" or last not in _NO_KEYS:
        key.append(last)
    return tuple(key)


Formatter = Callable[[ErrorDetails, Key, type[BaseModel]], str]
"""Returns the text for an error at a key of a model."""


def _of_value(text: str) -> Formatter:
    """Return the formatter of a text about the value, which begins with the value."""

    def formatted(
        detail: ErrorDetails, _key_of_error: Key, _model: type[BaseModel]
    ) -> str:
        value = detail["input"]
        shown = str(value).lower() if isinstance(value, bool) else value
        return f"'{shown}' " + text.format_map(detail.get("ctx", {}))

    return formatted


def _of_structure(text: str) -> Formatter:
    """Return the formatter of a text about a mapping or a list, which is not repeated."""
    return lambda detail, _key_of_error, _model: text.format_map(detail.get("ctx", {}))


FORMER_KEYS = {
    "patience": "stall_timeout",
    "return_window": "rejoin_timeout",
}
"""Former names of keys with the present ones, beside those that a method declares as `Options.former_keys`."""


def _unknown_key(_detail: ErrorDetails, key: Key, model: type[BaseModel]) -> str:
    name, known = str(key[-1]), _known_keys(key[:-1], model)
    # The schema has the keys of all tasks, so the key belongs to another one.
    if name in known:
        return f"'{name}' is not a key of this task: remove the key"
    former = {**FORMER_KEYS, **getattr(model, "former_keys", {})}
    present = former.get(name)
    if present in known:
        return f"'{name}' has been renamed: write '{present}'"
    return f"unknown key '{name}': {nearest(name, known)}"


def _explain_missing(_detail: ErrorDetails, key: Key, model: type[BaseModel]) -> str:
    about = _describe_key(key, model).get("description")
    return f"is missing: {about}" if about else "is missing"


def _explain_raised(
    detail: ErrorDetails, _key_of_error: Key, _model: type[BaseModel]
) -> str:
    """Return the message of a ValueError raised by one of our validators."""
    return str(detail.get("ctx", {}).get("error", detail["msg"]))


def _not_among(
    detail: ErrorDetails, _key_of_error: Key, _model: type[BaseModel]
) -> str:
    # pydantic gives the choices as text: 'mesh', 'star' or 'line'.
    expected = re.findall(r"'([^']*)'", str(detail.get("ctx", {}).get("expected", "")))
    value = str(detail["input"])
    return f"invalid value '{value}': {nearest(value, expected)}"


def _no_text(detail: ErrorDetails, key: Key, model: type[BaseModel]) -> str:
    value = detail["input"]
    if model is Scenario and key[:1] == ("expect",):
        like = f"== {str(value).lower()}" if isinstance(value, bool) else ">= 0.9"
        return f"'{value}' must be text: write a condition such as '{like}'"
    return f"'{value}' must be text: write it in quotes"


def _no_part(_detail: ErrorDetails, key: Key, model: type[BaseModel]) -> str:
    examples = ", ".join(_known_keys(key, model)[:6])
    return f"must be a mapping, with keys such as {examples}"


_WHOLE = _of_value("must be a whole number")
_NUMBER = _of_value("must be a number")
_BOOLEAN = _of_value("must be true or false")
_FORMATTERS: Mapping[str, Formatter] = {
    "extra_forbidden": _unknown_key,
    "missing": _explain_missing,
    "value_error": _explain_raised,
    "literal_error": _not_among,
    "string_type": _no_text,
    "string_pattern_mismatch": _of_value(
        "must be a name: lower-case letters, digits and dashes, a letter first, at most 31"
    ),
    "model_type": _no_part,
    "model_attributes_type": _no_part,
    "dict_type": _of_structure("must be a mapping of keys to values"),
    "tuple_type": _of_structure("must be a list: write [ ... ]"),
    "too_short": _of_structure(
        "is too short: at least {min_length} are needed, not {actual_length}"
    ),
    "too_long": _of_structure(
        "is too long: at most {max_length} are possible, not {actual_length}"
    ),
    "greater_than": _of_value("must be more than {gt:g}"),
    "greater_than_equal": _of_value("must be at least {ge:g}"),
    "less_than": _of_value("must be less than {lt:g}"),
    "less_than_equal": _of_value("must be at most {le:g}"),
    "int_parsing": _WHOLE,
    "int_type": _WHOLE,
    "int_from_float": _WHOLE,
    "float_parsing": _NUMBER,
    "float_type": _NUMBER,
    "finite_number": _of_value("must be a finite number"),
    "bool_parsing": _BOOLEAN,
    "bool_type": _BOOLEAN,
}
"""By pydantic's types of errors; other errors keep pydantic's own text."""


def _to_diagnostic(detail: ErrorDetails, model: type[BaseModel]) -> Diagnostic:
    key = _key_of_error(detail)
    formatter = _FORMATTERS.get(detail["type"])
    if formatter is None:
        return Diagnostic(key, detail["msg"][:1].lower() + detail["msg"][1:])
    return Diagnostic(key, formatter(detail, key, model))
