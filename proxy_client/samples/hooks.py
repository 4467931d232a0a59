"""Where the recording of samples hooks in; nothing of it does anything unless samples are asked for."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import ModuleType

from understudy.proxy_client.placement import Placement
from understudy.proxy_client.samples import drawing, own_iteration
from understudy.proxy_client.samples.contents import Contents
from understudy.proxy_client.samples.drawing import Loaders
from understudy.proxy_client.samples.recorder import Recorder, asked_for

_DATALOADER = "torch.utils.data.dataloader"


@dataclass(frozen=True)
class Recording:
    """The parts of it, in this process."""

    recorder: Recorder
    loaders: Loaders
    contents: Contents


_recording: Recording | None = None
"""None: nobody has asked for samples."""


def arrange() -> None:
    """As the environment says; once, before anything is recorded."""
    global _recording
    recorder = asked_for(os.environ)
    if recorder is None or _recording is not None:
        return
    _recording = Recording(recorder, Loaders(recorder), Contents(recorder))
    os.register_at_fork(after_in_child=recorder.after_fork)
    if (dataloader := sys.modules.get(_DATALOADER)) is not None:
        install(dataloader)


def install(dataloader: ModuleType) -> None:
    """Once `torch.utils.data.dataloader` is there, before anybody else changes how loaders are iterated."""
    if (now := _recording) is not None:
        drawing.install(dataloader, now.recorder, now.loaders)
        own_iteration.install(dataloader, now.recorder, now.loaders)


def install_in_accelerate(module: ModuleType) -> None:
    """Once `accelerate.data_loader` is there."""
    if (now := _recording) is not None:
        own_iteration.install_in_accelerate(module, sys.modules[_DATALOADER], now.recorder, now.loaders)


def begin_session(place: Placement) -> None:
    """This process is a rank."""
    if (now := _recording) is not None:
        from understudy.proxy_client import _client

        _client.keep_minibatch_contents()
        now.recorder.begin(place.rank, place.world)


def stepped() -> None:
    """An optimizer's step is committed."""
    if (now := _recording) is not None:
        now.contents.stepped()
        if not now.loaders.any:
            now.recorder.tell_once(
                "no DataLoader of PyTorch is iterated, so minibatches are known by their content alone"
            )


def end_session() -> None:
    """The script has ended, and its session is still open."""
    if (now := _recording) is not None:
        now.contents.end()
