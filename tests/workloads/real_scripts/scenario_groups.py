"""Which modules hold the scenarios of a group: only these are imported in its processes."""

from __future__ import annotations

import importlib

MODULES = {
    "optimizing": ("optimizing",),
    "memory": ("checkpointing", "autocasting"),
    "recurrent": ("recurring",),
    "loading": ("loading", "asking", "saving"),
    "programming": ("transforming", "hooking", "forking"),
    "extending": ("extending", "compiling"),
}


def import_group(group: str) -> None:
    for module in MODULES[group]:
        importlib.import_module(module)
