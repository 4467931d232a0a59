"""examples/char_gpt.py as it is, and then digests of what it trained.

    torchrun --nproc-per-node 2 sweep/soak_training.py --steps 100 --losses OUT --layers 2 --width 64

Beside the losses it writes state.json: digests of parameters, buffers and generators of each rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import char_gpt
from sweep_models import final_state, per_rank

models: list[char_gpt.CharGPT] = []


class RememberedGPT(char_gpt.CharGPT):
    """So that what main() trained can be looked at when it is done."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        models.append(self)


if __name__ == "__main__":
    arguments = char_gpt.parse_arguments()
    char_gpt.CharGPT = RememberedGPT  # type: ignore[assignment, misc]
    char_gpt.main()
    (model,) = models
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", rank) if arguments.device == "cuda" else torch.device("cpu")
    place = per_rank(arguments.losses.with_name("state.json"), rank)
    place.write_text(json.dumps(final_state(model, device), indent=1))
