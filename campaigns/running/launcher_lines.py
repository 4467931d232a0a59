"""What torchrun, and `understudy.jit`, print when ranks fail, as moments of a run's course."""

from __future__ import annotations

import re

from understudy.campaigns.results.stamps import LAUNCHER, Stamp

SAID = (
    ("launcher notices", re.compile(r"Sending process \d+ closing signal|failed \(exitcode: ")),
    ("launcher has ended all", re.compile(r"Rendezvous'ing worker group")),
    ("launcher starts", re.compile(r"Starting worker group")),
)
"""Of PyTorch 2.13, at LOGLEVEL=INFO."""
SAVED = re.compile(r"understudy\.jit: rank (\d+): step (\d+) saved in ([\d.]+) s \((.*?)\); ")


def stamp_of(line: str, now: float) -> Stamp | None:
    """What a line says; None if it is of no interest."""
    if found := SAVED.search(line):
        rank, step, took, reason = found.groups()
        return Stamp("saved", now - float(took), now, int(rank), step=int(step), note=reason)
    for what, pattern in SAID:
        if pattern.search(line):
            return Stamp(what, now, now, LAUNCHER)
    return None
