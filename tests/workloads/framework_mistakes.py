"""Prints what `understudy.jit` says of mistakes in the loops of frameworks, a line for each.

framework_mistakes.py OUT     # an empty folder
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

from understudy import jit
from understudy.jit.glue import lightning as with_lightning
from understudy.jit.glue import trainer as with_trainer
from understudy.jit.glue.accelerate import JitLoop

OUT = Path(sys.argv[1])


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(batch[0])["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def told(name: str, mistake: Callable[[], object]) -> None:
    try:
        mistake()
    except jit.JitError as error:
        print(f"{name}: {error}", flush=True)
    else:
        print(f"{name}: nothing", flush=True)
    jit.close()


def hugging_face(callback: with_trainer.JitCallback) -> Trainer:
    data = [{"x": torch.ones(1)} for _ in range(4)]
    arguments = TrainingArguments(
        output_dir=str(OUT / "model"), use_cpu=True, report_to="none", max_steps=2, disable_tqdm=True
    )
    return Trainer(Module(), arguments, train_dataset=data, callbacks=[callback])


def lightnings(callback: with_lightning.JitCallback, devices: int = 1) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu", devices=devices, max_steps=2, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, callbacks=[callback],
    )  # fmt: skip


def sharded(trainer: Trainer) -> Trainer:
    trainer.is_fsdp_enabled = True
    return trainer


def main() -> None:
    loader = DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=1)
    alone = with_trainer.JitCallback(OUT / "trainer")
    told("trainer without checkpoint()", hugging_face(alone).train)
    told("trainer in shards", lambda: alone.checkpoint(sharded(hugging_face(alone))))
    other = with_lightning.JitCallback(OUT / "lightning")
    told("lightning without checkpoint()", lambda: lightnings(other).fit(Module(), loader))
    told("lightning starts ranks", lambda: other.checkpoint(lightnings(other, devices=2)))
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    told("accelerate in shards", lambda: JitLoop(accelerator, OUT / "accelerate"))


if __name__ == "__main__":
    main()
