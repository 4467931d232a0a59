"""accelerate with the loop of `understudy.jit`: DDP, dropout, accumulation, shuffled samples, an evaluation.

`jit_accelerate.py TEXT OUT`, under torchrun.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from shared import Characters, text, tiny_llama
from struck import EPOCHS, finish, struck, tell

from understudy.jit.glue.accelerate import JitLoop

TEXT, OUT = text(sys.argv[1]), Path(sys.argv[2])
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
bare = tiny_llama(attention_dropout=0.1)
set_seed(1, device_specific=True)
optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 32)
loader = torch.utils.data.DataLoader(Characters(TEXT, 60), batch_size=2, shuffle=True)
others = torch.utils.data.DataLoader(Characters(TEXT[4000:], 8), batch_size=4)
model, optimizer, loader, others, scheduler = accelerator.prepare(bare, optimizer, loader, others, scheduler)
struck(bare)
loop = JitLoop(accelerator, OUT / "ckpt", job="accelerate", minimum_stall=20)
for epoch in loop.epochs(EPOCHS):
    losses = []
    model.train()
    for batch in loop.batches(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        loop.boundary()
        if accelerator.sync_gradients:
            tell(loop.step, sum(losses))
            losses = []
    model.eval()
    with torch.no_grad():
        tell(1000 + epoch, sum(accelerator.gather(model(**batch).loss).mean().item() for batch in others))
loop.close()
finish(bare, optimizer)
