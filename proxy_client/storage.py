"""Two methods of UntypedStorage whose CUDA half is compiled out of CPU builds."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def install(torch: ModuleType) -> None:
    """Gives `torch.UntypedStorage` its `device="cuda"` and `resize_` back."""
    from understudy.proxy_client import _client

    storage = torch.UntypedStorage
    original_new, original_resize = storage.__new__, storage.resize_

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return original_new(cls, *args, **kwargs)
        if args and not isinstance(args[0], int):
            return torch.tensor(list(args[0]), dtype=torch.uint8).to(device).untyped_storage()
        bytes_ = args[0] if args else kwargs.get("size", 0)
        return torch.empty(bytes_, dtype=torch.uint8, device=device).untyped_storage()

    def resize(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return original_resize(self, size)
        _client.resize_untyped_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size)
        return self

    storage.__new__ = staticmethod(new)
    storage.resize_ = resize
