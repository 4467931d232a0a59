"""Megatron-core's GPTModel in two replicas under `understudy.jit`, on the CPU as far as Megatron-core can be there.

`jit_megatron.py TEXT OUT`, under torchrun.  Its DDP and its training forward ask for `torch.cuda.current_device()`.
"""

import sys
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from shared import Characters, text
from struck import finish, struck, tell

from understudy import jit

TEXT, OUT = text(sys.argv[1]), Path(sys.argv[2])
torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel(1, 1)
torch.manual_seed(1)
config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True)
bare = GPTModel(
    config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=256, max_sequence_length=32
)
model = DistributedDataParallel(config=config, ddp_config=DistributedDataParallelConfig(), module=bare)
optimizer = torch.optim.Adam(bare.parameters())
struck(bare)


def save(path):
    torch.save({"model": bare.state_dict(), "optimizer": optimizer.state_dict()}, path)


jit.init(save, OUT / "ckpt", replica_group=parallel_state.get_data_parallel_group(), job="megatron")
if (found := jit.get_checkpoint_path()) is not None:
    state = torch.load(found, weights_only=True)
    bare.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    jit.restore_generators()
data, rank = Characters(TEXT, 64), torch.distributed.get_rank()
mask = torch.ones(1, 1, 32, 32).tril() < 0.5
for step in range(jit.completed_steps(), 16):
    tokens = torch.stack([data[4 * step + 2 * rank + one]["input_ids"] for one in range(2)])
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = model(tokens, torch.arange(32).expand(2, 32), mask, labels=tokens).mean()
    loss.backward()
    finalize_model_grads([model])
    optimizer.step()
    tell(step + 1, loss.item())
    jit.boundary()
jit.close()
finish(bare, optimizer)
