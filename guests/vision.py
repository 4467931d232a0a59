"""Programs of vision libraries, and PyTorch's own examples."""

from __future__ import annotations

from catalogue import Program

OTHER_LISTS = "autocast on the CPU has other lists of operators"
EXAMPLES = "pytorch/examples, "
EXAMPLES = "pytorch/examples, "

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
        not_natively="it takes workers, which draw other augmentations, channels_last and a fused AdamW only on a GPU",
    ),
    Program(
        "fastai_vision", "fastai", ("fast_learner.py", "vision", "{data}", "{out}", "to_fp16"), environment="vision",
        defaults="to_fp16, augmentation on the device, workers, lr_find, one cycle, export", not_natively=OTHER_LISTS,
    ),
    Program(
        "fastai_tabular", "fastai", ("fast_learner.py", "tabular", "{data}", "{out}"), environment="vision",
        defaults="embeddings of categories, own optimizer, lr_find, one cycle, export",
    ),
    Program(
        "mnist", EXAMPLES + "mnist", ("mnist_example.py", "{data}", "{out}"), written=True,
        defaults="Adadelta, workers, pinned memory; dropout on the device, seeded before each step",
    ),
    Program(
        "vae", EXAMPLES + "vae", ("vae_example.py", "{data}"), written=True,
        defaults="`randn_like` on the device, seeded before each step; workers, pinned memory",
    ),
    Program(
        "dcgan", EXAMPLES + "dcgan", ("dcgan_example.py", "{data}", "{out}"), written=True,
        defaults="two networks and optimizers, cudnn.benchmark, noise of the device, seeded before each step",
    ),
    Program(
        "word_language_model", EXAMPLES + "word_language_model", ("word_language_example.py", "{data}", "{out}"),
        written=True, defaults="LSTM with dropout, seeded before each step; no optimizer: `p.data.add_`",
    ),
    Program(
        "imagenet", EXAMPLES + "imagenet", ("imagenet_example.py", "{data}", "{out}"), written=True, environment="vision",
        defaults="ResNet18, ImageFolder, workers, pinned memory, checkpoints, resuming",
    ),
    Program(
        "super_resolution", EXAMPLES + "super_resolution", ("super_resolution_example.py", "{data}", "{out}"),
        written=True, defaults="PixelShuffle, Adam, workers; whole modules saved and loaded",
    ),
    Program(
        "siamese_network", EXAMPLES + "siamese_network", ("siamese_example.py", "{data}", "{out}"), written=True,
        defaults="ResNet18 on pairs, Adadelta, workers", environment="vision",
    ),
    Program(
        "mnist_forward_forward", EXAMPLES + "mnist_forward_forward", ("forward_forward_example.py", "{data}"),
        written=True, defaults="an optimizer for each layer; labels read one by one",
    ),
    Program(
        "time_sequence_prediction", EXAMPLES + "time_sequence_prediction", ("time_sequence_example.py",), written=True,
        defaults="LSTMCell in double precision, LBFGS with a closure",
    ),
)  # fmt: skip
