"""torch.cuda's streams and events, on top of torch's generic ones."""

from __future__ import annotations

from types import ModuleType
from typing import Any

_CUDA_DEVICE_TYPE = 1


def attributes(torch_c: ModuleType) -> dict[str, Any]:
    """What `torch.cuda.streams` derives its classes from, and the functions behind `current_stream()`."""
    from understudy.proxy_client import _client

    _client.publish_event_type(torch_c.Event)

    def current_stream(device: int) -> tuple[int, int, int]:
        return _client.current_stream(device), device, _CUDA_DEVICE_TYPE

    def default_stream(device: int) -> tuple[int, int, int]:
        return 0, device, _CUDA_DEVICE_TYPE

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        _client.exchange_device(device_index)
        _client.set_current_stream(stream_id, device_index)

    return {
        "_CudaStreamBase": _stream_base(torch_c),
        "_CudaEventBase": _event_base(torch_c),
        "_cuda_getCurrentStream": current_stream,
        "_cuda_getDefaultStream": default_stream,
        "_cuda_setStream": set_stream,
    }


def _stream_base(torch_c: ModuleType) -> type:
    from understudy.proxy_client import _client

    generic = torch_c.Stream

    class CudaStreamBase(generic):  # type: ignore[misc, valid-type]
        def __new__(
            cls,
            priority: int = 0,
            stream_id: int = 0,
            device_index: int = 0,
            device_type: int = 0,
            stream_ptr: int = 0,
            **_: Any,
        ) -> Any:
            if stream_id or device_index or device_type:
                return generic.__new__(
                    cls, stream_id=stream_id, device_index=device_index, device_type=device_type
                )
            device = torch_c.device("cuda", _client.current_device())
            return generic.__new__(cls, device=device, priority=priority)

        def __init__(self, *_: Any, **__: Any) -> None:
            """All is done by `__new__`."""

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

        @property
        def priority(self) -> int:
            return -(int(self.stream_id) % 2)

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -5

    return CudaStreamBase


def _event_base(torch_c: ModuleType) -> type:
    from understudy.proxy_client import _client

    generic = torch_c.Event

    class CudaEventBase(generic):  # type: ignore[misc, valid-type]
        def __new__(
            cls,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
            **_: Any,
        ) -> Any:
            return generic.__new__(
                cls, device="cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
            )

        def __init__(self, *_: Any, **__: Any) -> None:
            """All is done by `__new__`."""

        def elapsed_time(self, end: Any) -> float:
            """Milliseconds between two events made with enable_timing; recording one waits for the device."""
            return float(_client.elapsed_milliseconds(self, end))

        @property
        def cuda_event(self) -> int:
            return int(self.event_id)

        def wait(self, stream: Any = None) -> Any:
            return generic.wait(self, stream)

    return CudaEventBase
