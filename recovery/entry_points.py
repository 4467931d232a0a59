"""The installed commands.  Until one is loaded, Ctrl-C ends it without a word, as it ends other programs."""

from __future__ import annotations

import signal
from importlib import import_module


def proxyd() -> int:
    """The command of this name."""
    return _run("proxyd")


def proxyrun() -> int:
    """The command of this name."""
    return _run("proxyrun")


def recoveryctl() -> int:
    """The command of this name."""
    return _run("recoveryctl")


def _run(module: str) -> int:
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored: nohup
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = import_module(f"understudy.recovery.{module}").main
    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return int(main())
