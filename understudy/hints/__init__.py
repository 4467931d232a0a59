"""Functions that are cut off and go on: checkpoints at places that the programmer hints at (paper 000).

    @checkpoints(directory="run")
    def train(epochs):
        model = …
        for epoch in range(epochs):
            …
            checkpoint()            # here it may be cut
        return model

    train(100)                      # called again, in a new process: goes on behind the newest saved hint

The paper calls the decorator `schedule_checkpoints(allowance=)`, the hint `_checkpoint()`, and what `.source`
shows the result of `expand`.
"""

from __future__ import annotations

from .cost import Cost
from .decorating import checkpoint, checkpoints
from .source import HintError

__all__ = ["Cost", "HintError", "checkpoint", "checkpoints"]
