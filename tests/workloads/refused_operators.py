"""Calls each operator that it is given, with small arguments of its schema's types; prints what it raised."""

import json
import sys
from typing import Any

import torch

LEAVES: dict[str, Any] = {
    "int": 1, "SymInt": 1, "float": 0.5, "number": 1, "bool": False, "str": "none", "Device": "cuda",
}  # fmt: skip
OF_FACTORIES = {"device": "cuda", "dtype": torch.float32, "layout": torch.strided}
"""Else nothing would say that it is for the virtual device."""


def made(kind: Any, length: int | None = None) -> Any:
    """An argument of this type; `length`: of a list. Raises KeyError for what cannot be made."""
    if kind.kind() == "OptionalType":
        return None
    if kind.kind() == "TensorType":
        return LIKE.clone()
    if kind.kind() == "ListType":
        return [made(kind.getElementType())] * (length or 2)
    return LEAVES[str(kind)]


def outcome(name: str) -> str:
    """`kind: sentence` of what the call raised. Raises KeyError if it cannot be called from here."""
    base, _, overload = name.partition(".")
    space, _, short = base.partition("::")
    operator = getattr(getattr(getattr(torch.ops, space), short), overload or "default")
    given, named = [], {}
    for argument in operator._schema.arguments:
        if argument.name in OF_FACTORIES:
            value = OF_FACTORIES[argument.name]
        elif argument.has_default_value():
            value = argument.default_value
        else:
            value = made(argument.type, argument.N)
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            given.append(value)
    try:
        operator(*given, **named)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "done"


LIKE = torch.ones(2, 2, device="cuda")
found = {}
for name in json.loads(sys.argv[1]):
    try:
        found[name] = outcome(name)
    except KeyError as unknown:
        found[name] = f"not called: {unknown}"
print("RESULT " + json.dumps({"outcomes": found, "alive": LIKE.sum().item()}))
