"""Saving and loading tensors of the device, to wherever."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from script_scenario import Run, scenario, small_model, step

GROUP = "loading"


@scenario(GROUP)
def saving_and_loading_a_training(run: Run) -> None:
    model = small_model(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    path = run.folder / "training.pt"
    for turn in range(3):
        step(run, model(run.data(6, 8, seed=turn)).square().mean(), optimizer)
        scheduler.step()
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        },
        path,
    )
    again = small_model(run)
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loaded = torch.load(path, weights_only=True, map_location=run.device)
    again.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    for turn in range(3, 6):
        step(run, again(run.data(6, 8, seed=turn)).square().mean(), optimizer)
    run.keep_model(again)


@scenario(GROUP)
def loading_to_another_place(run: Run) -> None:
    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(run, model(run.data(6, 8)).square().mean(), optimizer)
    path = run.folder / "tensors.pt"
    shared = run.data(5)
    torch.save({"a": shared, "view": shared[1:4], "scalar": torch.tensor(3), "half": shared.half()}, path)
    places = {
        "none": None,
        "cpu": "cpu",
        "cpu device": torch.device("cpu"),
        "device": torch.device(run.device),
        "text": f"{run.device}:0" if run.on_cuda else "cpu",
        "function": lambda storage, location: storage,
        "mapping": {f"{run.device}:0": "cpu"},
    }
    for name, place in places.items():
        for weights_only in (True, False):
            got = torch.load(path, map_location=place, weights_only=weights_only)
            run.keep(f"{name} {weights_only}", [got["a"], got["view"], got["scalar"], got["half"]])
            got["a"][1] = 9
            run.keep("shared", got["view"])
            on_device = name in ("none", "device", "text")
            if run.on_cuda and got["a"].is_cuda != on_device:
                raise AssertionError(f"map_location {name} gave {got['a'].device}")
    torch.save(shared.cpu(), path)
    run.keep("to the device", torch.load(path, map_location=run.device))
    torch.save(shared, path, _use_new_zipfile_serialization=False)
    run.keep("old format", torch.load(path))
    run.keep("mmap", torch.load(run.folder / "tensors.pt", map_location="cpu"))
    step(run, model(run.data(6, 8)).square().mean(), optimizer)


@scenario(GROUP)
def copying_and_pickling(run: Run) -> None:
    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for turn in range(3):
        step(run, model(run.data(6, 8, seed=turn)).square().mean(), optimizer)
    twin = copy.deepcopy(model)
    run.keep_model(twin)
    pickled = pickle.loads(pickle.dumps({"x": run.data(3), "model": model}))
    run.keep("pickled", pickled["x"])
    run.keep_model(pickled["model"])
    whole = io.BytesIO()
    torch.save(model, whole)
    whole.seek(0)
    run.keep_model(torch.load(whole, weights_only=False))
    storage = run.data(4).untyped_storage()
    run.keep("storage", bytes(storage.cpu().tolist()).hex())
    run.keep("storage device", storage.device.type == run.device)
    x = run.data(6)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(24)
    x.copy_(run.data(6, seed=3))
    run.keep("resized", x)
    x.data = run.data(3)
    run.keep("data", x)
    step(run, model(run.data(6, 8)).square().mean(), optimizer)
