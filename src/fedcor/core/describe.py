"""What a record says of settings that are objects: what can be repeated, and what cannot.

    a number, a text, a list      itself
    a path                        its text
    a function or class           "module:name", if it can be imported under it
    an object                     {"class": "module:Class", its parameters}
    an array                      {"shape", "dtype", "sha256"}
    anything else, as a lambda    {"not repeatable": what it is and where it was written, ...}

Two descriptions are equal if, as far as one can tell, the runs would be. So a run is resumed only
with the same data and the same code of a lambda.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedcor.core.types import Array

NOT_REPEATABLE = "not repeatable"
_PLAIN = (bool, int, float, str, type(None))


class Described(ABC):
    """Base of what describes itself in a record."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Its settings as plain values."""


def describe(value: Any) -> Any:
    """`value` as plain values, as a record keeps them.

    Example:
        >>> from fedcor import FedProx
        >>> describe(FedProx(mu=0.5))
        {'class': 'fedcor:FedProx', 'weighted': False, 'mu': 0.5}
        >>> describe(describe)
        'fedcor.core.describe:describe'
    """
    if isinstance(value, Described):
        return value.describe()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [describe(item) for item in value]
        return tuple(items) if type(value) is tuple else items
    if _is_array(value):
        return describe_array(value)
    if isinstance(value, functools.partial):
        return _with_parameters(value.func, dict(enumerate(value.args)) | value.keywords)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return reference(value) or _not_repeatable(value)
    return _describe_object(value)


def reference(value: Any) -> str | None:
    """`module:name` of a function or class; None if it cannot be imported under that name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module in (None, "__main__") or name is None:
        return None
    found: Any = sys.modules.get(str(module))
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{_module_of(value)}:{name}" if found is value else None


def describe_array(given: Any) -> dict[str, Any]:
    """The shape, type and SHA-256 of an array or a tensor."""
    array = _numpy(given)
    content = np.ascontiguousarray(array)
    if not content.size:
        digest = hashlib.sha256()
    elif content.dtype.hasobject:
        digest = hashlib.sha256(repr(content.tolist()).encode())
    else:
        digest = hashlib.sha256(content.view(np.uint8).data)
    return {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": digest.hexdigest()}


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (
        hasattr(value, "detach") and hasattr(value, "numpy")  # a tensor of torch
    )


def _numpy(value: Any) -> Array:
    if not isinstance(value, np.ndarray) and hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.atleast_1d(np.asarray(value))


def _describe_object(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value) if field.init)
        parameters = {name: getattr(value, name) for name in names}
    elif callable(getattr(value, "state_dict", None)):  # a module of torch
        weights = {key: describe_array(item) for key, item in value.state_dict().items()}
        digest = hashlib.sha256(repr(weights).encode()).hexdigest()
        return {
            "class": _class_name(type(value)),
            "weights": digest,
            NOT_REPEATABLE: "a module with weights of its own",
        }
    else:
        parameters = getattr(value, "__dict__", {})
    return _with_parameters(type(value), parameters)


def _with_parameters(made_by: Any, parameters: Mapping[Any, Any]) -> dict[str, Any]:
    described = {str(key).lstrip("_"): describe(item) for key, item in parameters.items()}
    marker = {} if reference(made_by) else _not_repeatable(made_by)
    return {"class": _class_name(made_by), **described, **marker}


def _class_name(cls: Any) -> str:
    return f"{_module_of(cls)}:{getattr(cls, '__qualname__', repr(cls))}"


def _module_of(value: Any) -> str:
    """The module to import `value` from: `fedcor` itself for a public name."""
    module = str(getattr(value, "__module__", "?"))
    public = (
        module.startswith("fedcor.")
        and getattr(value, "__qualname__", "") in sys.modules["fedcor"].__all__
    )
    return "fedcor" if public else module


def _not_repeatable(value: Any) -> dict[str, Any]:
    """What it is and where it was written; and a digest of its code, so that a change is seen."""
    name = getattr(value, "__qualname__", type(value).__qualname__).rpartition(".")[2]
    codes = _codes(value)
    described = {NOT_REPEATABLE: f"{name} in {_place(codes)}"}
    if not codes:
        return described
    digest = hashlib.sha256(repr([_code_parts(code) for code in codes]).encode()).hexdigest()
    return {**described, "code": digest[:16]}


def _codes(value: Any) -> list[types.CodeType]:
    """The code of a function, or of the methods that are written in a class."""
    functions = vars(value).values() if isinstance(value, type) else [value]
    codes = [code for one in functions if (code := getattr(one, "__code__", None)) is not None]
    if not isinstance(value, type):
        return codes
    return [code for code in codes if code.co_filename != "<string>"]  # not what dataclasses add


def _place(codes: list[types.CodeType]) -> str:
    # IPython gives every cell a file name, another one in every session.
    file = codes[0].co_filename if codes else ""
    if not file or file.startswith("<") or "ipykernel" in file:
        return "a script or notebook"
    return Path(file).name


def _code_parts(code: types.CodeType) -> tuple[Any, ...]:
    constants: list[Any] = []
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            constants.append(_code_parts(item))
        else:  # the order of a set is another one in every process
            constants.append(sorted(map(repr, item)) if isinstance(item, frozenset) else item)
    return code.co_code, constants, code.co_names, code.co_varnames
