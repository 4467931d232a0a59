"""A bill drawn: what is wasted and what it costs over N, and which input matters most."""

from __future__ import annotations

from pathlib import Path

from understudy.recovery.base.errors import BadInput
from understudy.recovery.costs.bill import HOURS_PER_MONTH, LARGEST, Bill, fractions
from understudy.recovery.costs.comparing import influences
from understudy.recovery.costs.given.inputs import Inputs
from understudy.recovery.costs.text import TITLES

MOST_BARS = 10


def draw(inputs: Inputs, bill: Bill, path: Path) -> None:
    """A PNG.  Raises BadInput where matplotlib is missing, or the file cannot be written."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise BadInput("--plot needs matplotlib: pip install matplotlib") from None
    import numpy

    figure, axes = pyplot.subplots(1, 3, figsize=(17, 5))
    sizes = numpy.unique(numpy.geomspace(1, LARGEST, 400).astype(numpy.int64))
    for line in bill.lines:
        wasted = fractions(line.way, inputs, sizes)
        axes[0].plot(sizes, 100 * wasted, label=TITLES[line.way.value])
        if inputs.prices is not None:
            money = wasted * sizes * HOURS_PER_MONTH * inputs.prices.gpu_hour
            axes[1].plot(sizes, money, label=TITLES[line.way.value])
    for axis, title in zip(axes, ("wasted, percent of all time", "money a month"), strict=False):
        axis.set(xscale="log", yscale="log", xlabel="GPUs", title=title)
        axis.axvline(inputs.job.gpus, color="grey", linestyle=":")
    if bill.lines:
        axes[0].legend(fontsize="small")
        best = min(bill.lines, key=lambda line: line.waste.total)
        bars = influences(inputs, best.way)[:MOST_BARS][::-1]
        now = best.waste.fraction
        for place, bar in enumerate(bars):
            for value, color in ((bar.halved, "tab:blue"), (bar.doubled, "tab:red")):
                axes[2].barh(place, 100 * (value - now), left=100 * now, color=color)
        axes[2].set_yticks(range(len(bars)), [bar.name for bar in bars], fontsize="small")
        axes[2].set(title=f"{TITLES[best.way.value]}: halved (blue), doubled (red); percent wasted")
    figure.tight_layout()
    try:
        # The date and version that matplotlib would add make equal results differ.
        figure.savefig(path, format="png", dpi=110, metadata={"Software": None})
    except OSError as problem:
        raise BadInput(f"{path} cannot be written: {problem.strerror}") from problem
    finally:
        pyplot.close(figure)
