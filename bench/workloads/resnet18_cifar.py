"""ResNet-18 on 32 x 32 images: the network of He et al. (2016) with the small first layer used for CIFAR."""

import step_loop
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CLASSES, BATCH, BATCHES = 10, 8, 4


class Residual(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        layers: list[nn.Module] = []
        channels_in = 64
        for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            layers += [Residual(channels_in, channels, stride), Residual(channels, channels, 1)]
            channels_in = channels
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(512, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(F.adaptive_avg_pool2d(self.layers(self.stem(images)), 1).flatten(1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)


class Trainee:
    """The same training by halves of a step, as bench/workloads/adam_gpt.py has them for its own."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(1)
        self.model: nn.Module = ResNet18().to(device)
        if dist.is_initialized():
            self.model = DistributedDataParallel(self.model)
        self.optimizer = make_optimizer(self.model)
        self._images = torch.randn(BATCHES, BATCH, 3, 32, 32).to(device)
        self._labels = torch.randint(CLASSES, (BATCHES, BATCH)).to(device)
        self._number = 0

    def gradients(self) -> torch.Tensor:
        """Forward and backward; the loss."""
        place = self._number % BATCHES
        self._number += 1
        loss = F.cross_entropy(self.model(self._images[place]), self._labels[place])
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        """A step of SGD; gradients go at once, as their memory is not needed any more."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_step(device: torch.device) -> step_loop.Step:
    model = ResNet18().to(device)
    optimizer = make_optimizer(model)
    images = torch.randn(BATCHES, BATCH, 3, 32, 32)
    labels = torch.randint(CLASSES, (BATCHES, BATCH))

    def step(number: int) -> torch.Tensor:
        x, y = images[number % BATCHES].to(device), labels[number % BATCHES].to(device)
        loss = F.cross_entropy(model(x), y)
        return step_loop.update(optimizer, loss)

    return step


if __name__ == "__main__":
    step_loop.run("ResNet-18, 32 x 32", make_step, block=2)
