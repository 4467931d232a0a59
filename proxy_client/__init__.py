"""The virtual device: what turns "cuda" in an unmodified training script into records of a log.

This package is the only part of Understudy inside a worker. `boot/sitecustomize.py` loads it by path, so it
must import nothing of ours but itself, and of everyone else's only the standard library and, once that is
loaded, torch.
"""
