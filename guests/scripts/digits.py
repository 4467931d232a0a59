"""MNIST's test images from shared/data/mnist, and folders of pictures drawn from them."""

import gzip
from pathlib import Path

import numpy
import torch


def digits(data: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count`: bytes [count, 28, 28], and which digits they are."""
    folder = Path(data) / "mnist"
    pictures = gzip.decompress(folder.joinpath("t10k-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress(folder.joinpath("t10k-labels-idx1-ubyte.gz").read_bytes())
    images = numpy.frombuffer(pictures, numpy.uint8, count * 784, offset=16).reshape(count, 28, 28)
    return torch.tensor(images), torch.tensor(list(labels[8 : 8 + count]))


def write_image_folder(data: str, folder: Path, count: int, size: int) -> Path:
    """As ImageFolder reads it: a folder for each digit, pictures of three colours and `size` pixels a side."""
    from PIL import Image

    for number, (image, label) in enumerate(zip(*digits(data, count), strict=True)):
        its = folder / str(label.item())
        its.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(image.numpy()).convert("RGB").resize((size, size))
        picture.save(its / f"{number}.png")
    return folder
