"""Makes the mistakes that scripts make, one after the other; prints what each raised, as JSON."""

import json
import multiprocessing
import os
from collections.abc import Callable

import torch


def outcome(mistake: Callable[[], object]) -> list[str]:
    try:
        mistake()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test wants to see it
        return [type(error).__name__, str(error)]
    return ["", "nothing was raised"]


def with_another_pytorch() -> None:
    """What a worker with another PyTorch would tell proxyd."""
    ours, torch.__version__ = torch.__version__, "2.12.1+cpu"
    try:
        torch.ones(2, device="cuda")
    finally:
        torch.__version__ = ours


def with_an_impossible_rank() -> None:
    os.environ["RANK"] = "first"
    try:
        torch.ones(2, device="cuda")
    finally:
        del os.environ["RANK"]


def child_of_fork(mistake: Callable[[], object]) -> list[str]:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(outcome(mistake)))
    child.start()
    answer: list[str] = answers.get()
    child.join()
    return answer


result = {
    "another PyTorch": outcome(with_another_pytorch),
    "an impossible rank": outcome(with_an_impossible_rank),
    "cuda:7": outcome(lambda: torch.ones(2, device="cuda:7")),
    "cuda:7 by to()": outcome(lambda: torch.ones(2).to("cuda:7")),
    "cuda:7 by set_device()": outcome(lambda: torch.cuda.set_device(7)),
    "cuda:7 by cuda()": outcome(lambda: torch.nn.Linear(2, 2).cuda(7)),
}
here = torch.ones(3, device="cuda")
assert here.sum().item() == 3
result |= {
    "cuda:7 later": outcome(lambda: here.to("cuda:7")),
    "a second device": outcome(lambda: torch.ones(2, device="cuda:1")),
    "a second device by to()": outcome(lambda: here.to("cuda:1")),
    "fork, a new tensor": child_of_fork(lambda: torch.ones(2, device="cuda")),
    "fork, an old tensor": child_of_fork(lambda: here.add(1)),
    "fork, a value": child_of_fork(lambda: here.sum().item()),
    "fork, synchronize": child_of_fork(torch.cuda.synchronize),
}
assert (here + 1).sum().item() == 6, "the mistakes have harmed the session"
print("RESULT " + json.dumps(result), flush=True)
