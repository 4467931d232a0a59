"""What a training has come to, written down in the same words by every loop."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

from understudy.campaigns.programs.plan import Plan
from understudy.campaigns.results.stamps import Recorder

FINAL = "final.pt"
"""Parameters at the end, of the rank that wrote them first."""


def finish(plan: Plan, recorder: Recorder, model: Any, *, writes: bool) -> None:
    """A digest of this rank's parameters; the parameters themselves if it `writes` and nobody has."""
    import torch

    parameters = {name: one.detach().cpu() for name, one in model.named_parameters()}
    digest = hashlib.sha256()
    for name, one in parameters.items():
        digest.update(name.encode() + one.numpy().tobytes())
    recorder.moment("parameters", plan.steps, digest.hexdigest())
    if not writes:
        return
    new = Path(plan.folder) / f"{FINAL}.of-{os.getpid()}"
    torch.save(parameters, new)
    with contextlib.suppress(FileExistsError):
        os.link(new, Path(plan.folder) / FINAL)
    new.unlink()
