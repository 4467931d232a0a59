"""Programs of vision libraries, and PyTorch's own examples."""

from __future__ import annotations

from catalogue import Program

OTHER_LISTS = "autocast on the CPU has other lists of operators"

PROGRAMS = (
    Program(
        "timm", "timm", ("image_classifier.py", "{data}", "{out}"), environment="vision",
        defaults="its train.py: channels_last, mixup, EMA, prefetching loader with workers, clipping, resuming",
    ),
    Program(
        "timm_amp", "timm", ("image_classifier.py", "{data}", "{out}", "--amp"), environment="vision",
        defaults="the same with --amp: float16 and NativeScaler", not_natively=OTHER_LISTS,
    ),
    Program(
        "yolo11", "ultralytics", ("detector.py", "{data}", "{out}"), environment="vision",
        defaults="float16 AMP, EMA, mosaic, workers, warm-up, validation, last.pt", not_natively=OTHER_LISTS,
    ),
    Program(
        "yolo11_fp32", "ultralytics", ("detector.py", "{data}", "{out}", "amp=False"), environment="vision",
        defaults="the same with amp=False",
        not_natively="it loads its data in workers only where there is a GPU, and they draw other augmentations",
    ),
    Program(
        "fastai_vision", "fastai", ("fast_learner.py", "vision", "{data}", "{out}", "to_fp16"), environment="vision",
        defaults="to_fp16, augmentation on the device, workers, lr_find, one cycle, export", not_natively=OTHER_LISTS,
    ),
    Program(
        "fastai_tabular", "fastai", ("fast_learner.py", "tabular", "{data}", "{out}"), environment="vision",
        defaults="embeddings of categories, own optimizer, lr_find, one cycle, export",
    ),
)  # fmt: skip
