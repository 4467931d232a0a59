"""pytorch/examples imagenet/main.py `--seed 1 --gpu 0`: ResNet18, ImageFolder, workers, a checkpoint, then --resume: `imagenet_example.py DATA OUT`.

The pictures are small, and of ten kinds; the rest is what it does by itself.
"""

import shutil
import sys
from pathlib import Path

import torch
import torchvision.datasets as datasets
import torchvision.models as models
import torchvision.transforms as transforms
from digits import write_image_folder
from torch import nn
from torch.backends import cudnn
from torch.optim.lr_scheduler import StepLR

DATA, OUT = sys.argv[1], Path(sys.argv[2])
SIZE = 64


def build():
    model = models.resnet18(num_classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    return model, optimizer, StepLR(optimizer, step_size=30, gamma=0.1)


def loaders():
    normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    random = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()]
    fixed = [transforms.Resize(SIZE + 8), transforms.CenterCrop(SIZE)]
    sets = [
        datasets.ImageFolder(OUT / part, transforms.Compose([*steps, transforms.ToTensor(), normalize]))
        for part, steps in (("train", random), ("val", fixed))
    ]
    return [
        torch.utils.data.DataLoader(one, batch_size=8, shuffle=number == 0, num_workers=2, pin_memory=True)
        for number, one in enumerate(sets)
    ]


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [
            correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk
        ]


def train(epoch):
    model.train()
    for index, (images, target) in enumerate(train_loader):
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        print("KEPT", epoch, index, loss.item(), acc1[0].item(), acc5[0].item(), flush=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate():
    model.eval()
    total, losses = 0.0, []
    with torch.no_grad():
        for images, target in val_loader:
            images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
            output = model(images)
            losses.append(criterion(output, target).item())
            total += accuracy(output, target, topk=(1, 5))[0][0].item() * images.size(0)
    print("KEPT", losses, total / len(val_loader.dataset), flush=True)
    return total / len(val_loader.dataset)


def save_checkpoint(state, is_best):
    torch.save(state, OUT / "checkpoint.pth.tar")
    if is_best:
        shutil.copyfile(OUT / "checkpoint.pth.tar", OUT / "model_best.pth.tar")


torch.manual_seed(1)
cudnn.deterministic = True
cudnn.benchmark = False
if torch.accelerator.is_available():
    torch.accelerator.set_device_index(0)
    device = torch.accelerator.current_accelerator()
else:
    device = torch.device("cpu")
write_image_folder(DATA, OUT / "train", 32, SIZE)
shutil.copytree(OUT / "train", OUT / "val")
train_loader, val_loader = loaders()
criterion = nn.CrossEntropyLoss().to(device)
model, optimizer, scheduler = build()
best_acc1 = 0
for epoch in range(2):
    if epoch:  # a second call of main.py, with --resume
        model, optimizer, scheduler = build()
        checkpoint = torch.load(OUT / "checkpoint.pth.tar", map_location=device)
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    train(epoch)
    acc1 = validate()
    scheduler.step()
    is_best, best_acc1 = acc1 > best_acc1, max(acc1, best_acc1)
    save_checkpoint(
        {
            "epoch": epoch + 1, "arch": "resnet18", "state_dict": model.state_dict(), "best_acc1": best_acc1,
            "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
        },
        is_best,
    )  # fmt: skip
