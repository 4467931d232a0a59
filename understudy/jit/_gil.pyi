"""Frees the GIL from a thread that hangs in C and has it (paper 001 §3.2)."""

def start() -> None:
    """Begin to watch; with the first beat it counts. Raises RuntimeError."""

def beat(patience: float) -> None:
    """The caller has the GIL, and will be back within `patience` seconds."""

def freed() -> int:
    """The thread (gettid) that was made to give it up; 0: none."""

def stop() -> None:
    """Watch no more; a thread that was made to give it up stays where it is."""

def forget() -> None:
    """In a forked child: it is not watched."""
