"""Programs of transformers and what is built on it."""

from __future__ import annotations

from catalogue import Program

TEXT = "{data}/tinyshakespeare.txt"

PROGRAMS = (
    Program(
        "trainer", "transformers", ("trainer.py", TEXT, "{out}"),
        "Trainer: fused AdamW, workers, pinned memory, evaluation, saving, resuming",
    ),
    Program(
        "trainer_bf16", "transformers", ("trainer.py", TEXT, "{out}", "bf16", "gradient_checkpointing"),
        "Trainer in bfloat16 with gradient checkpointing",
        not_natively="autocast on the CPU has other lists of operators",
    ),
    Program(
        "generate_static_cache", "transformers", ("generate_static_cache.py",),
        "`generate(cache_implementation=\"static\")`, which compiles by itself",
    ),
)  # fmt: skip
