"""Checkpoints that a snapshot can be exported as; known without PyTorch, which takes seconds to load."""

FORMATS = ("torch", "dcp", "safetensors")
