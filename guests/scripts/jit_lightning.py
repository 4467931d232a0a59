"""Lightning's Trainer with the callback of `understudy.jit`: DDP, dropout, accumulation, validation, checkpoints.

`jit_lightning.py TEXT OUT`, under torchrun.
"""

import sys
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from shared import Characters, text, tiny_llama
from struck import EPOCHS, finish, struck, tell
from torch.utils.data import DataLoader

from understudy.jit.glue.lightning import JitCallback

TEXT, OUT = text(sys.argv[1]), Path(sys.argv[2])
warnings.filterwarnings("ignore", ".*does not have many workers.*")


class Language(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny_llama(attention_dropout=0.1)
        self.losses = []

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, outputs, batch, index):
        if index % 2:
            tell(self.global_step, sum(self.losses[-2:]))

    def validation_step(self, batch, index):
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            tell(1000 + self.global_step, self.trainer.callback_metrics["val_loss"])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16), "interval": "step"},
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), "monitor": "val_loss"},
        ]  # fmt: skip


lightning.seed_everything(1, verbose=False)
jit_callback = JitCallback(OUT / "ckpt", job="lightning", minimum_stall=20)
trainer = lightning.Trainer(
    devices=2, accelerator="cpu", strategy="ddp", max_epochs=EPOCHS, accumulate_grad_batches=2, val_check_interval=0.5,
    gradient_clip_val=1.0, enable_progress_bar=False, logger=False, enable_model_summary=False,
    callbacks=[jit_callback, ModelCheckpoint(OUT / "own", monitor="val_loss"), EarlyStopping("val_loss")],
)  # fmt: skip
module = Language()
train = DataLoader(Characters(TEXT, 64), batch_size=2, shuffle=True)
others = DataLoader(Characters(TEXT[4000:], 8), batch_size=2)
struck(module.model)
trainer.fit(module, train, others, ckpt_path=jit_callback.checkpoint(trainer))
finish(module, trainer.optimizers[0])
