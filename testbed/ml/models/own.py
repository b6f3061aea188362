"""A user's network as a chain of units: a function in the user's file that returns a `torch.nn.Module`.

`testbed.ml.models.unit_division` finds the units by tracing the network, once on the controller and once on each
device. In contrast to a catalogue model, planning such a network therefore needs torch.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from testbed.common import usercode
from testbed.common.errors import InputError
from testbed.common.usercode import Code
from testbed.ml.fields import Fields, InputSpec, all_whole
from testbed.ml.models.chain import Model
from testbed.ml.models.maker import MODEL_FILE_KEY, Maker
from testbed.ml.models.shapes import Shape
from testbed.ml.training.schema import LoraPart


def create_own(
    code: Code,
    options: Mapping[str, Any],
    shape: Shape,
    classes: int,
    units: Sequence[str] | None = None,
    *,
    integers: bool = False,
    fields: Fields = (),
    lora: LoraPart | None = None,
) -> Model:
    """Create a model from a user's function, for samples of a shape.

    Args:
        code: the text of the file and the name of the function.
        options: arguments of the function; parameters called ``shape`` and ``classes`` default to those of the data.
        shape: shape of a sample.
        classes: number of classes, or of predicted values of a sample.
        units: names of the modules beginning a unit; None leaves the choice to `testbed.ml.models.unit_division`.
        integers: whether samples are integers. The network gets float32 if it fails with integers.
        fields: the inputs of a sample, if there are several; the function's ``shape`` is then a mapping by input name.
        lora: adapters of the linear layers; None for none.

    Raises `InputError` naming the line if the network cannot be built or traced.
    """
    arguments = _bind_arguments(code, options, shape, classes, fields)
    # As texts and tuples, which have a hash for the cache.
    code_json = code.model_dump_json()
    arguments_json = json.dumps(arguments)
    unit_names = None if units is None else tuple(units)

    def trace_with(*, integers: bool) -> Model:
        input_spec = InputSpec(tuple(shape), integers, fields)
        return _trace_cached(
            code_json, arguments_json, input_spec, classes, unit_names, lora
        )

    if fields:
        return trace_with(integers=all_whole(fields))
    if not integers:
        return trace_with(integers=False)
    # Tokens have to stay integers for an embedding, while integers of a table may be ordinary features.
    try:
        return trace_with(integers=True)
    except InputError as integer_error:
        try:
            return trace_with(integers=False)
        except InputError as error:
            # The user may have meant either of the two, so both reasons are given.
            text = f"{error.text}; with samples as whole numbers: {integer_error.text}"
            raise InputError(text, error.key) from None


def _bind_arguments(
    code: Code,
    options: Mapping[str, Any],
    shape: Shape,
    classes: int,
    fields: Fields,
) -> dict[str, Any]:
    """Return the arguments of the user's function; raises `InputError` for options unknown to the function."""
    signature = inspect.signature(usercode.function(code, MODEL_FILE_KEY))
    arguments: dict[str, Any] = {}
    if "shape" in signature.parameters:
        arguments["shape"] = {each.name: each.shape for each in fields} or shape
    if "classes" in signature.parameters:
        arguments["classes"] = classes
    # Options of the scenario replace shape and classes of the data.
    arguments |= options
    try:
        signature.bind(**arguments)
    except TypeError as error:
        text = f"{code.name}{signature} rejects the model options: {error}; its arguments are the valid options"
        raise InputError(text, ("model",)) from None
    return arguments


# The points of a sweep, and several methods, use one network, which is then traced once.
@lru_cache(maxsize=16)
def _trace_cached(
    code_json: str,
    arguments_json: str,
    input_spec: InputSpec,
    classes: int,
    unit_names: tuple[str, ...] | None,
    lora: LoraPart | None,
) -> Model:
    from testbed.ml.models.unit_division import trace_model

    maker = Maker(Code.model_validate_json(code_json), arguments_json, lora)
    return trace_model(maker, input_spec, classes, unit_names)
