"""Lightning's Trainer: callbacks that save, stop early and watch, TensorBoard, and a second Trainer that resumes.

Its own launcher starts the other ranks: `lightning_fit.py DATA OUT RANKS PRECISION`.
"""

import sys
import warnings
from pathlib import Path

import lightning
import torch
from digits import digits
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DATA, OUT, RANKS, PRECISION = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
warnings.filterwarnings("ignore", ".*does not have many workers.*")


class Classifier(lightning.LightningModule):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(1352, width), nn.ReLU(),
            nn.Linear(width, 10),
        )  # fmt: skip

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def fit(epochs: int, resume: str | None) -> lightning.Trainer:
    saving = ModelCheckpoint(OUT / "checkpoints", monitor="val_loss", save_last=True)
    trainer = lightning.Trainer(
        devices=RANKS, strategy="ddp" if RANKS > 1 else "auto", precision=PRECISION, max_epochs=epochs,
        gradient_clip_val=1.0, log_every_n_steps=1, enable_progress_bar=False,
        logger=TensorBoardLogger(OUT / "logs"),
        callbacks=[saving, EarlyStopping("val_loss"), LearningRateMonitor(), DeviceStatsMonitor()],
    )  # fmt: skip
    trainer.fit(Classifier(), train, validation, ckpt_path=resume)
    metrics = {name: trainer.callback_metrics[name].item() for name in ("train_loss", "val_loss")}
    print("KEPT", trainer.global_rank, trainer.current_epoch, metrics, flush=True)
    return trainer


lightning.seed_everything(1)
images, labels = digits(DATA, 192)
data = TensorDataset(images[:, None] / 255, labels)
train = DataLoader(torch.utils.data.Subset(data, range(128)), batch_size=16, shuffle=True)
validation = DataLoader(torch.utils.data.Subset(data, range(128, 192)), batch_size=16)
fit(2, None)
fit(3, str(OUT / "checkpoints" / "last.ckpt"))
