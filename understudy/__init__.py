"""Understudy: whatever of ours is installed and imported has its name below this one.

In the repository the packages are reached through the symbolic links beside this file; in the wheel they are
folders.
"""

from __future__ import annotations


def __getattr__(name: str) -> str:
    """`__version__`, of the installed distribution. Read when asked for: it takes longer than an import."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch-understudy")
    except PackageNotFoundError:
        return "0+checkout"
