"""timm after its train.py: ViT in channels_last, mixup, EMA, a prefetching loader with workers, CheckpointSaver and resuming.

`image_classifier.py DATA OUT [--amp]`; --amp is float16 with NativeScaler, as there.
"""

import contextlib
import sys
from collections import OrderedDict
from pathlib import Path

import torch
from digits import write_image_folder
from timm import utils
from timm.data import Mixup, create_dataset, create_loader
from timm.loss import SoftTargetCrossEntropy
from timm.models import create_model, model_parameters, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ModelEmaV3, NativeScaler, update_summary

DATA, OUT, AMP = sys.argv[1], Path(sys.argv[2]), "--amp" in sys.argv
EPOCHS, SIZE = 3, 32
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True


def autocast():
    return torch.amp.autocast(device.type, torch.float16) if AMP else contextlib.nullcontext()


def build():
    model = create_model(
        "vit_tiny_patch16_224",
        num_classes=10,
        img_size=SIZE,
        patch_size=8,
        embed_dim=48,
        depth=2,
        num_heads=3,
    )
    model.to(device=device, memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    return model, optimizer, NativeScaler(device=device.type) if AMP else None


def train_one_epoch(epoch):
    mixup_fn.mixup_enabled = True
    model.train()
    losses = utils.AverageMeter()
    updates = epoch * len(loader)
    for index, (pictures, target) in enumerate(loader):
        pictures, target = pictures.to(device), target.to(device)
        pictures, target = mixup_fn(pictures, target)
        pictures = pictures.contiguous(memory_format=torch.channels_last)
        with autocast():
            loss = loss_fn(model(pictures), target)
        if loss_scaler is not None:
            loss_scaler(
                loss, optimizer, clip_grad=1.0, clip_mode="norm",
                parameters=model_parameters(model, exclude_head=False),
            )  # fmt: skip
        else:
            loss.backward()
            utils.dispatch_clip_grad(model_parameters(model, exclude_head=False), value=1.0, mode="norm")
            optimizer.step()
        optimizer.zero_grad()
        updates += 1
        model_ema.update(model, step=updates)
        if device.type == "cuda":
            torch.cuda.synchronize()
        losses.update(loss.item(), pictures.size(0))
        scheduler.step_update(num_updates=updates, metric=losses.avg)
        saver.save_recovery(epoch, batch_idx=index)
    return OrderedDict(loss=losses.avg)


def validate(one):
    one.eval()
    losses, top1 = utils.AverageMeter(), utils.AverageMeter()
    with torch.no_grad():
        for pictures, target in evaluation:
            pictures = pictures.to(device).contiguous(memory_format=torch.channels_last)
            target = target.to(device)
            with autocast():
                output = one(pictures)
                loss = torch.nn.functional.cross_entropy(output, target)
            losses.update(loss.item(), pictures.size(0))
            top1.update(utils.accuracy(output, target, topk=(1, 5))[0].item(), output.size(0))
    return OrderedDict(loss=losses.avg, top1=top1.avg)


utils.random_seed(42, 0)
folder = write_image_folder(DATA, OUT / "pictures", 64, SIZE)
dataset = create_dataset("", root=str(folder), split="train", is_training=True, batch_size=16)
loader = create_loader(
    dataset, input_size=(3, SIZE, SIZE), batch_size=16, is_training=True, num_workers=2, device=device,
    auto_augment="rand-m9-mstd0.5-inc1", pin_memory=False, use_prefetcher=True,
)  # fmt: skip
evaluation = create_loader(
    dataset,
    input_size=(3, SIZE, SIZE),
    batch_size=32,
    is_training=False,
    num_workers=1,
    device=device,
    crop_pct=1.0,
)
mixup_fn = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, prob=1.0, label_smoothing=0.1, num_classes=10)
loss_fn = SoftTargetCrossEntropy().to(device)
model, optimizer, loss_scaler = build()
model_ema = ModelEmaV3(model, decay=0.9, use_warmup=True)
saver = CheckpointSaver(
    model=model, optimizer=optimizer, amp_scaler=loss_scaler, model_ema=model_ema,
    checkpoint_dir=str(OUT), recovery_dir=str(OUT), decreasing=True,
)  # fmt: skip
for epoch in range(EPOCHS):
    if epoch == EPOCHS - 1:  # a second call of train.py, with --resume
        model, optimizer, loss_scaler = build()
        resume_checkpoint(model, str(OUT / "last.pth.tar"), optimizer=optimizer, loss_scaler=loss_scaler)
        model_ema = ModelEmaV3(model, decay=0.9, use_warmup=True)
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=EPOCHS, warmup_epochs=0, updates_per_epoch=len(loader),
        step_on_epochs=False,
    )  # fmt: skip
    trained = train_one_epoch(epoch)
    measured = validate(model)
    averaged = validate(model_ema.module)
    update_summary(epoch, trained, averaged, OUT / "summary.csv", write_header=epoch == 0)
    saver.save_checkpoint(epoch, metric=averaged["loss"])
    print("KEPT", epoch, dict(trained), dict(measured), dict(averaged), flush=True)
