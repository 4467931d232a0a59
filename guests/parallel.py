"""Programs of several ranks, after PyTorch's own examples and recipes."""

from __future__ import annotations

from catalogue import Program, torchrun

TEXT = "{data}/tinyshakespeare.txt"
ON_DEVICE = "it draws its dropout on the device, where it is not seeded before each step"
CALLS_CUDA = "it calls torch.cuda by name: it does not run without a GPU"
EXAMPLES = "pytorch/examples, distributed/"
TITAN = (
    "torchtitan_debug.py", TEXT, "--training.seq_len", "64", "--training.local_batch_size", "2", "--training.steps", "8",
    "--checkpoint.enable", "--checkpoint.interval", "4", "--debug.seed", "42",
    "--validator.enable", "--validator.steps", "2", "--validator.dataloader.dataset", "c4_test",
    "--parallelism.spmd_backend", "partial_dtensor",
)  # fmt: skip
"""Small, with a seed, checkpoints and validation; its default of how layers are sharded needs a later PyTorch."""
MEGATRON = "Megatron-LM, run_simple_mcore_train_loop.py"

PROGRAMS = (
    Program(
        "fsdp2_example", EXAMPLES + "FSDP2", ("fsdp2_example.py", "--out", "{out}"), written=True,
        defaults="meta device, initialised in shards, dropout, clipping, full state dict", launcher=torchrun(2), ranks=2,
        not_natively=ON_DEVICE,
    ),
    Program(
        "fsdp2_example_mixed", EXAMPLES + "FSDP2",
        ("fsdp2_example.py", "--mixed-precision", "--explicit-prefetching", "--out", "{out}"), written=True,
        defaults="the same with --mixed-precision --explicit-prefetching", launcher=torchrun(2), ranks=2,
        not_natively=ON_DEVICE,
    ),
    Program(
        "tensor_parallel", EXAMPLES + "tensor_parallelism", ("tensor_parallel_example.py", "tensor"), written=True,
        defaults="colwise and rowwise linear layers on DTensors", launcher=torchrun(2), ranks=2,
    ),
    Program(
        "sequence_parallel", EXAMPLES + "tensor_parallelism", ("tensor_parallel_example.py", "sequence"), written=True,
        defaults="the same, sharded over the sequence", launcher=torchrun(2), ranks=2,
    ),
    Program(
        "fsdp_tp", EXAMPLES + "tensor_parallelism", ("tensor_parallel_example.py", "fsdp_tp"), written=True,
        defaults="a Llama with SDPA on DTensors, FSDP2 around it",
        not_natively="PyTorch knows no sharding of the CPU's attention: it fails there", launcher=torchrun(4), ranks=4,
    ),
    Program(
        "min_gpt_ddp", EXAMPLES + "minGPT-ddp", ("min_gpt_ddp.py", TEXT, "{out}"), written=True,
        defaults="use_amp: float16 autocast, GradScaler, nn.MultiheadAttention, workers, snapshots",
        launcher=torchrun(2), ranks=2, not_natively="autocast on the CPU has other lists of operators",
    ),
    Program(
        "elastic_ddp", EXAMPLES + "ddp-tutorial-series", ("elastic_ddp.py", "{out}"), written=True,
        defaults="torchrun --max-restarts: a rank fails by itself, all go on from snapshot.pt",
        not_natively="natively the second attempt fails now and then: Gloo finds the first one's addresses in the store",
        launcher=("torchrun", "--standalone", "--max-restarts", "2", "--nproc-per-node", "2"), ranks=2,
    ),
    Program(
        "async_checkpoint", "PyTorch's recipes, distributed_async_checkpoint", ("async_checkpoint.py", "{out}"),
        written=True, defaults="FSDP2, activation checkpointing, dcp.async_save, a second model resumes",
        not_natively="natively saving and training would share one Gloo group, from two threads",
        launcher=torchrun(2), ranks=2,
    ),
    Program(
        "megatron_tensor", MEGATRON, ("megatron_gpt.py", "tensor", TEXT, "{out}"), environment="megatron", written=True,
        defaults="megatron-core 0.16's GPTModel, tensor parallel 2: attention dropout by the RNG tracker, its DDP, distributed checkpoint",
        not_natively=CALLS_CUDA, launcher=torchrun(2), ranks=2,
    ),
    Program(
        "megatron_pipeline", MEGATRON, ("megatron_gpt.py", "pipeline", TEXT, "{out}"), environment="megatron", written=True,
        defaults="the same with pipeline parallel 2 (1F1B), tied embeddings, bfloat16, its distributed optimizer, clipping",
        not_natively=CALLS_CUDA, launcher=torchrun(2), ranks=2,
    ),
    Program(
        "torchtitan_llama3", "torchtitan", (*TITAN, "--training.disable_cuda_graphs"), environment="torchtitan",
        defaults="its debug model without CUDA graphs: FSDP2 from the meta device in bfloat16, selective checkpointing, checkpoints, validation",
        not_natively=CALLS_CUDA, launcher=torchrun(2), ranks=2,
    ),
    Program(
        "torchtitan_tensor", "torchtitan",
        (*TITAN, "--training.disable_cuda_graphs", "--parallelism.tensor_parallel_degree", "2"), environment="torchtitan",
        defaults="the same with tensor and sequence parallel 2: DTensors", not_natively=CALLS_CUDA, launcher=torchrun(2),
        ranks=2,
    ),
    Program(
        "torchtitan_graphs", "torchtitan", TITAN, environment="torchtitan",
        defaults="its debug model as it is, with CUDA graphs", not_natively=CALLS_CUDA, launcher=torchrun(2), ranks=2,
        fails="CUDA graphs are refused: --training.disable_cuda_graphs is torchtitan's own switch",
        refusal="a CUDA graph cannot work on understudy's virtual device",
    ),
)  # fmt: skip
