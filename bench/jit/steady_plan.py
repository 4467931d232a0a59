"""In which order blocks of steps are made, with and without `jit`."""

PATTERN = ("without", "with", "timed", "with", "without")
"""One round. The first two are beside each other, and the last two: so what drifts is in both."""
PAIRS = ((1, 0), (3, 4))
"""With, and without: places in a round."""
UNCOUNTED = 4
"""Steps at the beginning of a block."""
