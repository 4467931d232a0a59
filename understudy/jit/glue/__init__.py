"""What `understudy.jit` needs in the loops of frameworks, a file for each; none is imported but by its name.

    from understudy.jit.glue.trainer import JitCallback      # Hugging Face's Trainer
    from understudy.jit.glue.accelerate import JitLoop       # accelerate
    from understudy.jit.glue.lightning import JitCallback    # Lightning
    from understudy.jit.glue.deepspeed import JitLoop        # DeepSpeed

Each saves without collectives, goes on with the samples that come next, and gives generators back where an
undisturbed run would have them. `docs/library.md` says what each was tested with, and what it refuses.
"""
