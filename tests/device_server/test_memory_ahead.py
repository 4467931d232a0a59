"""Servers on processors take memory before they need it."""

from __future__ import annotations

import resource

from understudy.proxy_server import _server

BUFFERS, BYTES = 160, 100_000
PAGES = BUFFERS * BYTES // resource.getpagesize()


def faults_of(kept: list[list[bytes]]) -> int:
    """Pages that this thread has to take from the kernel for so many buffers, which are kept."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    kept.append([bytes(BYTES) for _ in range(BUFFERS)])
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_what_was_taken_ahead_costs_no_page_faults_any_more() -> None:
    _server.keep_freed_memory()
    kept: list[list[bytes]] = []
    while faults_of(kept) < PAGES // 2:  # what is free in this process already
        assert len(kept) < 200
    _server.touch_memory(2 * BUFFERS * BYTES)
    assert faults_of(kept) < PAGES // 10
