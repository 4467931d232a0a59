"""The training with nvidia-resiliency-ext: `python with_nvrx.py PLAN.json`, under its ft_launcher.

Its layers are nested as in its own example (fault_tolerance/in_job_and_in_process_example.py): an exception
restarts the training inside the same processes, ft_launcher starts new ones when a rank is gone or sends no
heartbeat, and either way the training goes on from local checkpoints.
"""

import os
import sys
import time
from pathlib import Path

from understudy.campaigns.programs.plan import Plan
from understudy.campaigns.programs.training import ATTEMPT
from understudy.campaigns.results.stamps import Recorder

MOST_IN_PROCESS = 1000
"""Restarts inside of one process, so that each has a number of its own."""


def main() -> None:
    began = time.monotonic()
    plan = Plan.read(Path(sys.argv[1]))
    rank = int(os.environ["RANK"])
    attempt = int(os.environ.get(ATTEMPT, "0")) + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    recorder = Recorder(Path(plan.folder), rank, attempt * MOST_IN_PROCESS)
    recorder.write("began", began, began)
    with recorder.part("imports"):
        from understudy.campaigns.programs.nvrx_loop import restartable
    restartable(plan, rank, attempt * MOST_IN_PROCESS)
    recorder.moment("done")
    sys.stdout.flush()
    os._exit(0)  # as in training.py


if __name__ == "__main__":
    main()
