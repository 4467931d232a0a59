"""accelerate after its examples' `complete_nlp_example`: DDP, accumulation, a scheduler, save_state and load_state."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from shared import Characters, text, tiny_llama

OUT = Path(sys.argv[2])
set_seed(1)
accelerator = Accelerator(gradient_accumulation_steps=2, project_dir=str(OUT))
model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
loader = torch.utils.data.DataLoader(Characters(text(sys.argv[1]), 64), batch_size=2, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    if accelerator.is_main_process or accelerator.distributed_type == "FSDP":
        print("KEPT", epoch, loss.item(), flush=True)
    accelerator.save_state(str(OUT / "state"))
    accelerator.wait_for_everyone()
    accelerator.load_state(str(OUT / "state"))
accelerator.end_training()
