"""A network of the user's: a function in a file that returns a `torch.nn.Module`, as a chain of units.

Its units are found by tracing it once (`testbed.ml.models.tracing`), on the controller and on each device; so unlike
the networks of the catalogue, it needs torch to be planned.
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
from testbed.ml.fields import Entering, Fields, all_whole
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
    integers: bool = False,
    fields: Fields = (),
    lora: LoraPart | None = None,
) -> Model:
    """Make a model of what a user's function returns, for samples of a shape.

    ``options`` are the function's arguments; one that it calls ``shape`` or ``classes`` is given the data's where they
    do not name it. ``units`` names the modules that begin a unit; None: `testbed.ml.models.tracing` decides.
    ``integers``: samples are whole numbers, and given to the network as such if it takes them, else as float32.
    ``lora`` gives adapters to its linear layers.
    ``fields``: the several inputs that a sample consists of; the function's ``shape`` then is of each, by name.
    Raises `InputError` for what cannot be made or traced, naming the line.
    """
    function = usercode.function(code, KEY)
    signature = inspect.signature(function)
    sizes = {each.name: each.shape for each in fields} or shape
    offered = {name: value for name, value in (("shape", sizes), ("classes", classes)) if name in signature.parameters}
    arguments = {**offered, **options}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        text = f"{code.name}{signature} cannot be called so: {error}; options of the model are its arguments"
        raise InputError(text, ("model",)) from None
    text = code.model_dump_json()
    wanted = None if units is None else tuple(units)

    def made(whole: bool) -> Model:
        return _traced(text, json.dumps(arguments), Entering(tuple(shape), whole, fields), classes, wanted, lora)

    if fields or not integers:
        return made(bool(fields) and all_whole(fields))
    try:
        return made(True)
    except InputError as first:
        try:
            return made(False)
        except InputError as error:
            raise InputError(f"{error.text}; with samples as whole numbers: {first.text}", error.key) from None


@lru_cache(maxsize=16)
def _traced(
    code: str,
    arguments: str,
    entering: Entering,
    classes: int,
    units: tuple[str, ...] | None,
    lora: LoraPart | None,
) -> Model:
    from testbed.ml.models.tracing import traced

    return traced(Maker(Code.model_validate_json(code), arguments, lora), entering, classes, units)
