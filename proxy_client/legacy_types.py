"""torch.cuda.FloatTensor and its kin: what a CPU build of PyTorch has under these names refuses to work."""

from __future__ import annotations

from types import ModuleType
from typing import Any

_TYPES = {
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Float": "float32",
    "Double": "float64",
}


class _LegacyType(type):
    """Its instances are types of which tensors are instances, and which make tensors when they are called."""

    dtype: Any
    is_cuda = True
    is_sparse = False

    def __call__(cls, *args: Any, device: Any = "cuda") -> Any:
        import torch

        options: dict[str, Any] = {"dtype": cls.dtype, "device": device}
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            return args[0].detach().to(**options)
        if len(args) == 1 and isinstance(args[0], torch.UntypedStorage | torch.TypedStorage):
            return torch.empty(0, **options).set_(args[0])
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            return torch.tensor(args[0], **options)
        return torch.empty(*(args or (0,)), **options)

    def __instancecheck__(cls, value: object) -> bool:
        import torch

        return (
            isinstance(value, torch.Tensor)
            and value.is_cuda
            and value.layout is torch.strided
            and value.dtype is cls.dtype
        )


def install(torch: ModuleType) -> None:
    """Replaces the types; teaches `Tensor.new` and `torch.set_default_tensor_type` the new ones."""
    for name, dtype in _TYPES.items():
        # Tensor.type() reads the type's whole name.
        full_name = f"torch.cuda.{name}Tensor"
        members = {"dtype": getattr(torch, dtype), "layout": torch.strided, "__module__": "torch.cuda"}
        setattr(torch.cuda, f"{name}Tensor", _LegacyType(full_name, (), members))
    legacy = {getattr(torch, dtype): getattr(torch.cuda, f"{name}Tensor") for name, dtype in _TYPES.items()}
    new = torch.Tensor.new

    def new_of_same_type(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_cuda or self.layout is not torch.strided or self.dtype not in legacy:
            return new(self, *args, **kwargs)
        return legacy[self.dtype](*args, **{"device": self.device, **kwargs})

    torch.Tensor.new = new_of_same_type
    set_default = torch.set_default_tensor_type

    def set_default_tensor_type(wanted: Any) -> None:
        if isinstance(wanted, str) and wanted.startswith("torch.cuda."):
            wanted = getattr(torch.cuda, wanted.removeprefix("torch.cuda."), wanted)
        if not isinstance(wanted, _LegacyType):
            return set_default(wanted)
        torch.set_default_dtype(wanted.dtype)
        torch.set_default_device("cuda")
        return None

    torch.set_default_tensor_type = set_default_tensor_type  # type: ignore[attr-defined]
