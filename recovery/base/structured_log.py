"""Logging of proxyd: for eyes on a terminal, JSON lines anywhere else."""

from __future__ import annotations

import logging
import sys

import structlog

FIRST = ("timestamp", "level", "event")


def in_order(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """When, how bad and what stand first in each line, for eyes that read JSON."""
    return {name: event[name] for name in FIRST if name in event} | dict(event)


def configure(level: str = "info") -> None:
    """Log to stderr from `level` on."""
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            in_order,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),  # a line in one piece, unlike print
    )
