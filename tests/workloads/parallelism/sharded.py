"""State that is not replicated: FSDP, tensor parallelism, pipelines, ZeRO."""
