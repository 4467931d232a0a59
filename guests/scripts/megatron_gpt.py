"""Megatron-LM's examples/run_simple_mcore_train_loop.py, on a text that its dataset builder makes indices of.

`megatron_gpt.py tensor|pipeline TEXT OUT`.  `tensor` is the example's loop: tensor parallel 2, its DDP, Adam, a
distributed checkpoint that is loaded again.  `pipeline`: two stages, four microbatches by 1F1B, bfloat16, Megatron's
distributed optimizer with clipping, which the example leaves out.
"""

import os
import sys
from functools import partial
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.tokenizers.text.libraries import NullTokenizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.optim import Adam
from torch.utils.data import DataLoader

KIND, TEXT, OUT = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
PIPELINE = KIND == "pipeline"
SEQUENCE_LENGTH, BATCH, STEPS, VOCABULARY = 64, 4, 10, 256
MICROBATCHES = 4 if PIPELINE else 1


def initialize_distributed():
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(world_size=torch.cuda.device_count(), rank=rank)
    parallel_state.initialize_model_parallel(*((1, 2) if PIPELINE else (2, 1)))


def model_provider():
    config = TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, pipeline_dtype=torch.bfloat16 if PIPELINE else torch.float32,
        tensor_model_parallel_size=1 if PIPELINE else 2, pipeline_model_parallel_size=2 if PIPELINE else 1,
        bf16=PIPELINE, params_dtype=torch.bfloat16 if PIPELINE else torch.float32,
    )  # fmt: skip
    return GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE_LENGTH, share_embeddings_and_output_weights=True,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip


def data_parallel():
    model = model_provider().cuda()
    config = model.config
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=PIPELINE, overlap_grad_reduce=False, use_distributed_optimizer=PIPELINE
    )
    if PIPELINE:
        model = Float16Module(config, model)
    return DistributedDataParallel(config=config, ddp_config=settings, module=model)


def write_text(prefix):
    """As tools/preprocess_data.py does."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    for paragraph in TEXT.read_bytes()[:50000].split(b"\n\n"):
        builder.add_document(torch.tensor(list(paragraph)), [len(paragraph)])
    builder.finalize(f"{prefix}.idx")


def train_data_iterator():
    prefix = OUT / "text"
    if torch.distributed.get_rank() == 0:
        write_text(prefix)
    torch.distributed.barrier()
    config = GPTDatasetConfig(
        random_seed=0, sequence_length=SEQUENCE_LENGTH, blend=([str(prefix)], None), split="1", reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, tokenizer=NullTokenizer(VOCABULARY - 1),
    )  # fmt: skip
    datasets = BlendedMegatronDatasetBuilder(
        GPTDataset, [STEPS * BATCH * MICROBATCHES, None, None], lambda: True, config
    ).build()
    return iter(DataLoader(datasets[0], batch_size=BATCH))


def forward_step(data_iterator, model):
    def loss_func(loss_mask, output_tensor):
        loss_mask = loss_mask.view(-1).float()
        loss = torch.sum(output_tensor.float().view(-1) * loss_mask) / loss_mask.sum()
        return loss, {"lm loss": loss.detach().clone()}  # the schedule divides the other in place

    data = {name: value.cuda() for name, value in next(data_iterator).items()}
    output = model(data["tokens"], data["position_ids"], data["attention_mask"], labels=data["labels"])
    return output, partial(loss_func, data["loss_mask"])


def optimizer_of(model):
    if not PIPELINE:
        return Adam(model.parameters())
    config = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
    )
    return get_megatron_optimizer(config, [model])


def train(model, optimizer):
    model.train()
    iterator = train_data_iterator()
    forward_backward = get_forward_backward_func()
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward(
            forward_step_func=forward_step, data_iterator=iterator, model=model, num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE_LENGTH, micro_batch_size=BATCH, decoder_seq_length=SEQUENCE_LENGTH, forward_only=False,
        )  # fmt: skip
        finalize_model_grads([model])
        optimizer.step()
        kept = [loss["lm loss"].item() for loss in losses]
        print("KEPT", torch.distributed.get_rank(), step, kept, flush=True)


def save_and_load(model):
    """The example's: a second model takes the parameters of the first from a distributed checkpoint."""
    folder = OUT / "checkpoint"
    folder.mkdir(exist_ok=True)
    dist_checkpointing.save(
        sharded_state_dict=model.module.sharded_state_dict(prefix=""), checkpoint_dir=str(folder)
    )
    second = data_parallel()
    state = dist_checkpointing.load(
        sharded_state_dict=second.module.sharded_state_dict(prefix=""), checkpoint_dir=str(folder)
    )
    second.module.load_state_dict(state)
    for name, value in second.module.named_parameters():
        assert torch.equal(value, model.module.get_parameter(name)), name


if __name__ == "__main__":  # saving starts a process that imports this file
    initialize_distributed()
    torch.manual_seed(123)  # as megatron/training/initialize.py: position embeddings are drawn on the CPU
    model_parallel_cuda_manual_seed(123)
    model = data_parallel()
    train(model, optimizer_of(model))
    save_and_load(model)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
