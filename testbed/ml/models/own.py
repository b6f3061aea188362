"""A user's network as a chain of units: a function in a file that returns a `torch.nn.Module`.

Units are derived by tracing the network once (`testbed.ml.models.tracing`), on the controller and on each device. In
contrast to catalogue models, planning such a network therefore needs torch.
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
from testbed.ml.models.making import KEY, Maker
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
        options: arguments of the function; arguments called ``shape`` or ``classes`` default to those of the data.
        shape: shape of a sample.
        classes: number of classes, or of predicted values of a sample.
        units: names of the modules beginning a unit; None leaves the choice to `testbed.ml.models.tracing`.
        integers: whether samples are integers, passed to the network as such if it accepts them, else as float32.
        fields: the inputs of a sample, if there are several; the function's ``shape`` is then a mapping by input name.
        lora: adapters of the linear layers.

    Raises `InputError` naming the line if the network cannot be built or traced.
    """
    arguments = _bind_arguments(code, options, shape, classes, fields)
    # As texts and tuples, since the key of a cache needs a hash.
    code_text = code.model_dump_json()
    arguments_text = json.dumps(arguments)
    named_units = None if units is None else tuple(units)

    def trace_with(*, integers: bool) -> Model:
        input_spec = InputSpec(tuple(shape), integers, fields)
        return _trace_cached(
            code_text, arguments_text, input_spec, classes, named_units, lora
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
            # Which of the two the user meant is unknown, so both reasons are given.
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
    signature = inspect.signature(usercode.function(code, KEY))
    arguments: dict[str, Any] = {}
    if "shape" in signature.parameters:
        arguments["shape"] = {each.name: each.shape for each in fields} or shape
    if "classes" in signature.parameters:
        arguments["classes"] = classes
    # Options of the scenario replace the values of the data.
    arguments |= options
    try:
        signature.bind(**arguments)
    except TypeError as error:
        text = f"{code.name}{signature} rejects the model options: {error}; its arguments are the valid options"
        raise InputError(text, ("model",)) from None
    return arguments


# A sweep and several methods of one network trace it once.
@lru_cache(maxsize=16)
def _trace_cached(
    code: str,
    arguments: str,
    input_spec: InputSpec,
    classes: int,
    units: tuple[str, ...] | None,
    lora: LoraPart | None,
) -> Model:
    from testbed.ml.models.tracing import trace_model

    maker = Maker(Code.model_validate_json(code), arguments, lora)
    return trace_model(maker, input_spec, classes, units)
