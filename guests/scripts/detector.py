"""ultralytics' YOLO 11, from its yaml file, trained on a tiny detection data set, validated, saved and asked: `detector.py DATA OUT [amp=False]`."""

import os
import sys
from pathlib import Path

import numpy
import torch
from digits import digits
from PIL import Image

DATA, OUT = sys.argv[1], Path(sys.argv[2])
os.environ["YOLO_CONFIG_DIR"] = str(OUT)
import torchvision  # noqa: E402 - it makes its settings as it is imported
from ultralytics import YOLO  # noqa: E402
from ultralytics.utils.nms import TorchNMS  # noqa: E402

torchvision.ops.nms = (
    TorchNMS.nms
)  # its own, as where torchvision is not imported: torchvision's library does not load


def write_detection_set(folder: Path, count: int, size: int) -> Path:
    """Two digits a picture, and their boxes, as the data set format of ultralytics' documentation has them."""
    images, labels = digits(DATA, 2 * count)
    generator = numpy.random.default_rng(0)
    for number in range(count):
        split = "val" if number >= count * 3 // 4 else "train"
        canvas, boxes = numpy.zeros((size, size), numpy.uint8), []
        for half in (0, 1):
            which = 2 * number + half
            top, left = generator.integers(size - 28), half * size // 2 + generator.integers(size // 2 - 28)
            canvas[top : top + 28, left : left + 28] = images[which].numpy()
            middle = (left + 14) / size, (top + 14) / size
            boxes.append(f"{labels[which]} {middle[0]} {middle[1]} {28 / size} {28 / size}")
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
        Image.fromarray(canvas).convert("RGB").save(folder / "images" / split / f"{number}.png")
        (folder / "labels" / split / f"{number}.txt").write_text("\n".join(boxes) + "\n")
    names = "".join(f"  {digit}: '{digit}'\n" for digit in range(10))
    description = folder / "digits.yaml"
    description.write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames:\n{names}")
    return description


described = write_detection_set(OUT / "set", 32, 64)
model = YOLO("yolo11n.yaml")
switches = {"amp": False} if "amp=False" in sys.argv else {}
model.train(
    data=str(described), epochs=3, imgsz=64, batch=8, nbs=8, workers=2, project=str(OUT / "runs"),
    device=0 if torch.cuda.is_available() else "cpu", plots=False, **switches,
)  # fmt: skip
if model.trainer.amp is not switches.get("amp", torch.cuda.is_available()):
    raise RuntimeError("its check has switched AMP off")
print("KEPT", {name: float(value) for name, value in model.trainer.metrics.items()}, flush=True)
model.trainer.model.guest_result = True
model.trainer.ema.ema.guest_result = True
trained = YOLO(model.trainer.last)
found = trained.predict(str(OUT / "set" / "images" / "val"), imgsz=64, conf=0.001, verbose=False)
print("KEPT", [len(one.boxes) for one in found], flush=True)
