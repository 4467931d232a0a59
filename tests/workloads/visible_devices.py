"""Sets CUDA_VISIBLE_DEVICES in children that have imported torch already; prints what each sees, as JSON."""

import json
import os
import sys

import torch

USED = (None, "1", "1,0")  # with these the device is used, too: a session each


def seen(value: str | None) -> dict[str, object]:
    if value is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = value
    found = {"count": torch.cuda.device_count(), "available": torch.cuda.is_available()}
    if found["available"] and value in USED:
        found["works"] = torch.ones(3, device="cuda").sum().item() == 3
        found["current"] = torch.cuda.current_device()
    return found


def in_child(value: str | None) -> dict[str, object]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writer, "w") as pipe:
            json.dump(seen(value), pipe)
        sys.exit(0)  # in order, so that the session ends in order
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    found: dict[str, object] = json.loads(text)
    return found


values: list[str | None] = json.loads(sys.argv[1])
print("RESULT " + json.dumps([in_child(value) for value in values]), flush=True)
