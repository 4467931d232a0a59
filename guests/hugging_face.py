"""Programs of transformers and what is built on it."""

from __future__ import annotations

from catalogue import Program, torchrun

TEXT = "{data}/tinyshakespeare.txt"
ON_CPU = (("ACCELERATE_USE_CPU", "true"),)
"""Else accelerate trains each rank by itself where there is no GPU."""
OTHER_LISTS = "autocast on the CPU has other lists of operators"
ACCELERATE = ("accelerate", "launch", "--num_processes", "2", "--num_machines", "1", "--dynamo_backend", "no")

PROGRAMS = (
    Program(
        "trainer", "transformers", ("trainer.py", TEXT, "{out}"),
        "Trainer: fused AdamW, workers, pinned memory, evaluation, saving, resuming",
    ),
    Program(
        "trainer_bf16", "transformers", ("trainer.py", TEXT, "{out}", "bf16", "gradient_checkpointing"),
        "Trainer in bfloat16 with gradient checkpointing", not_natively=OTHER_LISTS,
    ),
    Program(
        "trainer_fp16_eager", "transformers", ("trainer.py", TEXT, "{out}", "fp16", "eager"),
        "Trainer in float16 with eager attention and GradScaler", not_natively=OTHER_LISTS,
    ),
    Program(
        "trainer_two_ranks", "transformers", ("trainer.py", TEXT, "{out}"), "Trainer under torchrun: DDP", native_variables=ON_CPU,
        launcher=torchrun(2), ranks=2,
    ),
    *(
        Program(
            f"moe_{name.lower()}", "transformers", ("mixture_of_experts.py", TEXT, name),
            f"{name}ForCausalLM in training: grouped experts, counts by histc",
        )
        for name in ("Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss")
    ),
    Program(
        "padded_with_dropout", "transformers", ("padded_with_dropout.py", TEXT),
        "GPT-2 and BERT in training: boolean masks with SDPA, dropout 0.1, seeded before each step",
    ),
    Program(
        "generate_static_cache", "transformers", ("generate_static_cache.py",),
        "`generate(cache_implementation=\"static\")`, which compiles by itself",
    ),
    Program(
        "generate_sampling", "transformers", ("generate_sampling.py",), "`generate`: greedy, beams, sampling",
    ),
    Program(
        "accelerate_ddp", "accelerate", ("accelerated_ddp.py", TEXT, "{out}"),
        "accelerate launch: DDP, accumulation, save_state, load_state",
        not_natively="accelerate launch trains each rank by itself where there is no GPU", launcher=ACCELERATE, ranks=2,
    ),
    Program(
        "accelerate_fsdp2", "accelerate", ("accelerated_ddp.py", TEXT, "{out}"),
        "accelerate launch --use_fsdp --fsdp_version 2, bfloat16", ranks=2, not_natively=OTHER_LISTS,
        launcher=(*ACCELERATE, "--use_fsdp", "--fsdp_version", "2", "--mixed_precision", "bf16",
                  "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
    ),
    Program(
        "peft_lora", "peft", ("low_rank_adapter.py", TEXT, "{out}"), "LoRA in Trainer; adapter saved, loaded, merged",
    ),
    Program(
        "trl_sft", "trl", ("preferences.py", "sft", TEXT, "{out}"), "SFTTrainer: bfloat16, gradient checkpointing",
        not_natively=OTHER_LISTS,
    ),
    Program(
        "trl_dpo", "trl", ("preferences.py", "dpo", TEXT, "{out}"), "DPOTrainer: bfloat16, reference model",
        not_natively=OTHER_LISTS,
    ),
    Program(
        "trl_grpo", "trl", ("preferences.py", "grpo", TEXT, "{out}"), "GRPOTrainer: generation inside the loop",
        not_natively=OTHER_LISTS,
    ),
    Program(
        "sentence_transformers", "sentence-transformers", ("sentence_embeddings.py", TEXT, "{out}"),
        "its trainer with in-batch negatives, and encode",
    ),
    Program(
        "x_transformers", "x-transformers", ("x_transformer.py", TEXT), "decoder with flash attention, trained; generate",
    ),
)  # fmt: skip
