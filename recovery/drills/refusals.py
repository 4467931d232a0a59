"""Drills that would end the job that rehearses them: refused, unless that is asked for."""

from __future__ import annotations

FLAG = "--even-if-it-ends-the-job"


def would_end(kind: str, *, device: str, can_move: bool) -> str:
    """How fault `kind` ends a job, in a sentence; empty if it goes on.

    `can_move`: whether a rank that loses `device` finds another one, here or at another host.
    """
    if kind == "device-gone" and not can_move:
        return f"no other device is free that its rank could go to once {device} is gone"
    if kind == "lasting-partition":
        return "its rank never reaches its peers again"
    if kind == "kill-worker":
        return "the program of its rank is killed, and only its launcher could start it anew"
    return ""
