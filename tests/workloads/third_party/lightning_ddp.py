"""A lightning Trainer with DDP on two devices; the Trainer starts its second process itself.

An ordinary script: it knows of no proxy. `--device cpu` is what its reference run asks for.
"""

import argparse
import os
from pathlib import Path

import lightning
import torch
from results import write

parser = argparse.ArgumentParser()
parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--devices", type=int, default=2)
args = parser.parse_args()


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
            torch.nn.Linear(4 * 6 * 6, 10),
        )  # fmt: skip
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layers(images), labels)
        self.losses.append(loss.detach())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        images, labels = batch
        hits = (self.layers(images).argmax(1) == labels).float().mean()
        self.log("accuracy", hits, sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


lightning.seed_everything(1, verbose=False)
data = torch.utils.data.TensorDataset(torch.randn(64, 1, 8, 8), torch.arange(64) % 10)
model = Classifier()
trainer = lightning.Trainer(
    accelerator={"cpu": "cpu", "cuda": "gpu"}[args.device],
    devices=args.devices,
    strategy="ddp",
    max_steps=args.steps,
    limit_val_batches=1,
    val_check_interval=3,
    check_val_every_n_epoch=None,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    log_every_n_steps=1,
)
trainer.fit(
    model,
    torch.utils.data.DataLoader(data, batch_size=4, shuffle=True),
    torch.utils.data.DataLoader(data, batch_size=8),
)
assert trainer.strategy.root_device.type == args.device, trainer.strategy.root_device
write(
    args.out.with_name(f"{args.out.name}.{trainer.global_rank}"),
    [*model.losses, trainer.callback_metrics["accuracy"]],
    model,
)
print("rank", trainer.global_rank, "of", trainer.world_size, "trained", trainer.global_step, "steps", flush=True)
