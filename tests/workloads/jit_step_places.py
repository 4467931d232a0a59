"""The places of a training step at which a rank of `jit_places.py` can fail, in their order."""

LAYERS = 5
"""Of the network, each with a group of the optimizer's."""
REDUCTIONS = 6
"""Places among a step's reductions of gradients: in front of each of its last ones."""
PLACES = (
    "batch",
    "zero-grad",
    *(f"{when}-forward-{layer}" for layer in range(LAYERS) for when in ("before", "behind")),
    "loss",
    "before-backward",
    *(f"{when}-backward-{layer}" for layer in reversed(range(LAYERS)) for when in ("before", "behind")),
    *(f"reduction-{number}" for number in range(REDUCTIONS)),
    "behind-backward",
    *(f"optimizer-{group}" for group in range(LAYERS)),
    "behind-optimizer",
    "behind-scheduler",
    "boundary",
    "behind-boundary",
)
GATE = "gate"
"""One more, for jobs with several shards: a rank fails while it waits there for another one."""
