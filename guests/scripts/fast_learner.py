"""fastai after its documentation: `fast_learner.py vision|tabular DATA OUT [to_fp16]`; its Optimizer is none of torch.optim's."""

import sys
from pathlib import Path

import numpy
import pandas
from digits import write_image_folder
from fastai.tabular.all import (
    Categorify,
    FillMissing,
    Normalize,
    TabularDataLoaders,
    tabular_learner,
)  # fmt: skip
from fastai.vision.all import (
    CrossEntropyLossFlat,
    ImageDataLoaders,
    Learner,
    accuracy,
    aug_transforms,
    load_learner,
    nn,
    set_seed,
)  # fmt: skip

KIND, DATA, OUT = sys.argv[1], sys.argv[2], Path(sys.argv[3])


def vision() -> Learner:
    folder = write_image_folder(DATA, OUT / "pictures", 80, 28)
    loaders = ImageDataLoaders.from_folder(
        folder, valid_pct=0.2, seed=1, bs=16, num_workers=2, batch_tfms=aug_transforms(do_flip=False, size=28)
    )
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    return Learner(loaders, network, loss_func=CrossEntropyLossFlat(), metrics=accuracy, path=OUT)


def tabular() -> Learner:
    draw = numpy.random.default_rng(0)
    table = pandas.DataFrame(
        {
            "colour": draw.choice(["red", "green", "blue"], 160),
            "age": draw.normal(40, 9, 160),
            "size": draw.normal(size=160),
        }
    )
    table["bought"] = numpy.where((table["colour"] == "red") ^ (table["age"] > 40), "yes", "no")
    loaders = TabularDataLoaders.from_df(
        table, path=OUT, procs=[Categorify, FillMissing, Normalize], cat_names=["colour"], cont_names=["age", "size"],
        y_names="bought", valid_idx=list(range(128, 160)), bs=16,
    )  # fmt: skip
    return tabular_learner(loaders, layers=[32, 16], metrics=accuracy)


set_seed(1, reproducible=True)
learner = {"vision": vision, "tabular": tabular}[KIND]()
if "to_fp16" in sys.argv:
    learner = learner.to_fp16()
learner.lr_find(num_it=8, show_plot=False)
with learner.no_bar():
    learner.fit_one_cycle(3, 1e-2)
learner.model.guest_result = True
learner.save("saved")
learner.load("saved")
print("KEPT", [list(map(float, row)) for row in learner.recorder.values], flush=True)
learner.export(OUT / "exported.pkl")
print("KEPT", learner.validate(), type(load_learner(OUT / "exported.pkl")).__name__, flush=True)
