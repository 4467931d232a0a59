"""DeepSpeed's engine with the loop of `understudy.jit`: dropout, accumulation, clipping, its loader and scheduler.

`jit_deepspeed.py TEXT OUT [STAGE]`, under torchrun, with DS_ACCELERATOR=cpu; its optimizer is PyTorch's.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from shared import Characters, text
from struck import EPOCHS, finish, struck, tell
from torch import nn

from understudy.jit.glue.deepspeed import JitLoop

TEXT, OUT, STAGE = text(sys.argv[1]), Path(sys.argv[2]), int((*sys.argv[3:], 0)[0])
CONFIG = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 10}},
    "gradient_clipping": 1.0, "steps_per_print": 2000, "zero_optimization": {"stage": STAGE},
}  # fmt: skip


class Language(nn.Module):
    """The next letter by the last one's embedding, with dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(256, 32), nn.Dropout(0.1), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 256)
        )

    def forward(self, tokens):
        return nn.functional.cross_entropy(self.layers(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


deepspeed.init_distributed()
torch.manual_seed(0)
model = Language()
torch.manual_seed(1 + torch.distributed.get_rank())
engine, optimizer, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), training_data=Characters(TEXT, 64), config=CONFIG
)
struck(model)
loop = JitLoop(engine, OUT / "ckpt", job="deepspeed", minimum_stall=20)
for _epoch in loop.epochs(EPOCHS):
    losses = []
    for batch in loop.batches(loader):
        loss = engine(batch["input_ids"])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        loop.boundary()
        if len(losses) == 2:
            tell(loop.step, sum(losses))
            losses = []
loop.close()
finish(model, engine.basic_optimizer)
