"""The training of all variants: `python training.py PLAN.json`, under torchrun, with or without the proxy.

What it needs is imported in `main`: what that takes is one of a restart's parts.
"""

import os
import sys
import time
from pathlib import Path

from understudy.campaigns.programs.plan import Plan
from understudy.campaigns.results.stamps import Recorder

ATTEMPT = "CAMPAIGN_ATTEMPT"
"""How often the supervisor has started the ranks before."""


def main() -> None:
    began = time.monotonic()
    plan = Plan.read(Path(sys.argv[1]))
    rank = int(os.environ["RANK"])
    attempt = int(os.environ.get(ATTEMPT, "0")) + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    recorder = Recorder(Path(plan.folder), rank, attempt)
    recorder.write("began", began, began)
    with recorder.part("imports"):
        from understudy.campaigns.programs.loop import train
    train(plan, recorder, rank, attempt)
    recorder.moment("done")
    if plan.device == "cpu":
        sys.stdout.flush()
        os._exit(0)  # PyTorch 2.13 aborts now and then when an interpreter ends that has used Gloo


if __name__ == "__main__":
    main()
