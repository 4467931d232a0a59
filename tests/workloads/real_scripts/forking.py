"""A process that forks after it has used the device."""

from __future__ import annotations

import os

import torch
from script_scenario import Run, scenario, small_model, step

GROUP = "programming"


@scenario(GROUP)
def child_of_a_process_that_used_the_device(run: Run) -> None:
    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(3):
        step(run, model(run.data(6, 8, seed=turn)).square().mean(), optimizer)
        if not run.on_cuda:
            continue
        child = os.fork()
        if child == 0:
            try:
                model(torch.ones(1, 8, device="cuda"))
            except RuntimeError as error:
                os._exit(0 if "Cannot re-initialize CUDA in forked subprocess" in str(error) else 1)
            os._exit(2)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != 0:
            raise AssertionError(f"the child ended with {status}")
    run.keep_model(model)
