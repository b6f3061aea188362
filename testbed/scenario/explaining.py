"""Conversion of pydantic's validation errors to located diagnostics in plain words.

Pydantic reports an error as `ErrorDetails`: its type, its key and the invalid value. `_FORMATTERS` maps each type to a
function that returns the text for users. The JSON schema of the scenario tells which keys exist and what they mean.
"""

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
    """Convert the errors of one section, which ``model`` describes, to diagnostics.

    ``prefix`` is the key of the section in the scenario.
    """
    details = error.errors(include_url=False)
    intended_keys = set()
    for detail in details:
        if detail["type"] == "extra_forbidden":
            intended_keys.add(_closest_key(detail["loc"], model))
    problems = []
    for detail in details:
        # A required key that is misspelt would be reported twice: as unknown and as missing.
        if detail["type"] != "missing" or detail["loc"] not in intended_keys:
            problem = _to_diagnostic(detail, model)
            problems.append(Diagnostic(prefix + problem.key, problem.text))
    return problems


def _closest_key(key: Key, model: type[BaseModel]) -> Key:
    """Return the key of the model most similar to an unknown key; the enclosing section if none is similar."""
    *section, name = key
    return (*section, *closest(str(name), _known_keys(tuple(section), model)))


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
    for definition in (schema, *schema.get("$defs", {}).values()):
        if "description" in definition:
            # Examples in docstrings are Python, whereas a schema describes YAML.
            text = definition["description"].partition("\n\n>>>")[0]
            definition["description"] = text
    return schema


def _schema_alternatives(
    schema: Mapping[str, Any], model: type[BaseModel]
) -> list[Mapping[str, Any]]:
    """Return the schemas of all valid forms of a value, for example name or mapping; follows references."""
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


def _schema_at(key: Key, model: type[BaseModel]) -> Mapping[str, Any]:
    """Return the JSON schema of one key; empty for an unknown key."""
    schemas: list[Mapping[str, Any]] = [_schema_of(model)]
    for part in key:
        inner_schemas = []
        for outer_schema in schemas:
            for alternative in _schema_alternatives(outer_schema, model):
                item = _schema_of_item(alternative, part)
                if isinstance(item, Mapping):
                    inner_schemas.append(item)
        schemas = inner_schemas
    return schemas[0] if schemas else {}


def _schema_of_item(schema: Mapping[str, Any], part: str | int) -> Any:
    """Return the schema of one item of a list or mapping; None, or a boolean, for an unknown item."""
    if isinstance(part, int):
        prefix: Sequence[Mapping[str, Any]] = schema.get("prefixItems", ())
        return prefix[part] if part < len(prefix) else schema.get("items")
    properties = schema.get("properties", {})
    if part in properties:
        return properties[part]
    # The values of a mapping by user-chosen names, such as `devices`, have one schema: that of the only pattern.
    for item in schema.get("patternProperties", {}).values():
        return item
    return schema.get("additionalProperties")


def _known_keys(key: Key, model: type[BaseModel]) -> list[str]:
    """Return the names of the valid keys directly below a key."""
    names: list[str] = []
    for alternative in _schema_alternatives(_schema_at(key, model), model):
        names += alternative.get("properties", {})
    return names


_MARKERS = frozenset({"[key]", "[keys]", "[name]"})
"""Entries of the location of a pydantic error that are no keys of the file.

``[key]`` means that the key of a mapping is invalid; the others are the tags of unions in our models.
"""


def _key_of_error(detail: ErrorDetails) -> Key:
    *outer, last = detail["loc"] or ("[key]",)
    key = [part for part in outer if part not in _MARKERS]
    # An unknown key may have any name, even that of a marker.
    if detail["type"] == "extra_forbidden" or last not in _MARKERS:
        key.append(last)
    return tuple(key)


Formatter = Callable[[ErrorDetails, Key, type[BaseModel]], str]
"""Function that returns the text for an error at a key of a model."""


def _value_formatter(text: str) -> Formatter:
    """Return a formatter with the invalid value before the text, as in ``'x' must be a number``."""

    def format_value(detail: ErrorDetails, _key: Key, _model: type[BaseModel]) -> str:
        value = detail["input"]
        # YAML writes true and false, Python True and False.
        yaml_value = str(value).lower() if isinstance(value, bool) else value
        return f"'{yaml_value}' " + text.format_map(detail.get("ctx", {}))

    return format_value


def _structure_formatter(text: str) -> Formatter:
    """Return a formatter for an invalid mapping or list, which is too long to be repeated in the text."""
    return lambda detail, _key, _model: text.format_map(detail.get("ctx", {}))


FORMER_KEYS = {
    "patience": "stall_timeout",
    "return_window": "rejoin_timeout",
}
"""Former name -> present name of keys, in addition to `Options.former_keys` of a method."""


def _explain_unknown_key(
    _detail: ErrorDetails, key: Key, model: type[BaseModel]
) -> str:
    name = str(key[-1])
    known_names = _known_keys(key[:-1], model)
    # The schema has the keys of all tasks, so this key belongs to another task.
    if name in known_names:
        return f"'{name}' is not a key of this task: remove the key"
    former_keys = {**FORMER_KEYS, **getattr(model, "former_keys", {})}
    present_name = former_keys.get(name)
    if present_name in known_names:
        return f"'{name}' has been renamed: write '{present_name}'"
    return f"unknown key '{name}': {nearest(name, known_names)}"


def _explain_missing(_detail: ErrorDetails, key: Key, model: type[BaseModel]) -> str:
    description = _schema_at(key, model).get("description")
    return f"is missing: {description}" if description else "is missing"


def _explain_raised(detail: ErrorDetails, _key: Key, _model: type[BaseModel]) -> str:
    """Return the message of a ValueError raised by one of our validators."""
    return str(detail.get("ctx", {}).get("error", detail["msg"]))


def _explain_choice(detail: ErrorDetails, _key: Key, _model: type[BaseModel]) -> str:
    # pydantic gives the choices as text: 'mesh', 'star' or 'line'.
    expected = str(detail.get("ctx", {}).get("expected", ""))
    choices = re.findall(r"'([^']*)'", expected)
    value = str(detail["input"])
    return f"invalid value '{value}': {nearest(value, choices)}"


def _explain_text(detail: ErrorDetails, key: Key, model: type[BaseModel]) -> str:
    value = detail["input"]
    if model is Scenario and key[:1] == ("expect",):
        example = f"== {str(value).lower()}" if isinstance(value, bool) else ">= 0.9"
        return f"'{value}' must be text: write a condition such as '{example}'"
    return f"'{value}' must be text: write it in quotes"


def _explain_section(_detail: ErrorDetails, key: Key, model: type[BaseModel]) -> str:
    examples = ", ".join(_known_keys(key, model)[:6])
    return f"must be a mapping, with keys such as {examples}"


_WHOLE_NUMBER = _value_formatter("must be a whole number")
_NUMBER = _value_formatter("must be a number")
_BOOLEAN = _value_formatter("must be true or false")
_FORMATTERS: Mapping[str, Formatter] = {
    "extra_forbidden": _explain_unknown_key,
    "missing": _explain_missing,
    "value_error": _explain_raised,
    "literal_error": _explain_choice,
    "string_type": _explain_text,
    "string_pattern_mismatch": _value_formatter(
        "must be a name: lower-case letters, digits and dashes, a letter first, at most 31"
    ),
    "model_type": _explain_section,
    "model_attributes_type": _explain_section,
    "dict_type": _structure_formatter("must be a mapping of keys to values"),
    "tuple_type": _structure_formatter("must be a list: write [ ... ]"),
    "too_short": _structure_formatter(
        "is too short: at least {min_length} are needed, not {actual_length}"
    ),
    "too_long": _structure_formatter(
        "is too long: at most {max_length} are possible, not {actual_length}"
    ),
    "greater_than": _value_formatter("must be more than {gt:g}"),
    "greater_than_equal": _value_formatter("must be at least {ge:g}"),
    "less_than": _value_formatter("must be less than {lt:g}"),
    "less_than_equal": _value_formatter("must be at most {le:g}"),
    "int_parsing": _WHOLE_NUMBER,
    "int_type": _WHOLE_NUMBER,
    "int_from_float": _WHOLE_NUMBER,
    "float_parsing": _NUMBER,
    "float_type": _NUMBER,
    "finite_number": _value_formatter("must be a finite number"),
    "bool_parsing": _BOOLEAN,
    "bool_type": _BOOLEAN,
}
"""Formatters by pydantic's types of errors; errors of other types keep pydantic's own text."""


def _to_diagnostic(detail: ErrorDetails, model: type[BaseModel]) -> Diagnostic:
    key = _key_of_error(detail)
    formatter = _FORMATTERS.get(detail["type"])
    if formatter is None:
        return Diagnostic(key, detail["msg"][:1].lower() + detail["msg"][1:])
    return Diagnostic(key, formatter(detail, key, model))
