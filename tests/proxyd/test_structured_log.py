"""Lines of proxyd's log, and what commands say beside them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys


def test_each_line_begins_with_when_how_bad_and_what() -> None:
    code = (
        "import structlog\n"
        "from understudy.recovery.base.structured_log import configure\n"
        "configure()\n"
        "structlog.get_logger().warning('fault', rank=1, kind='server-died')\n"
        "structlog.get_logger().debug('not shown')\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert list(json.loads(line)) == ["timestamp", "level", "event", "rank", "kind"]


def test_a_line_is_one_piece_also_where_python_does_not_buffer() -> None:
    """Of what several processes write to one pipe lines would run together."""
    code = (
        "import structlog\n"
        "from understudy.recovery.base.structured_log import configure\n"
        "from understudy.recovery.config.command_line import say\n"
        "configure()\n"
        "structlog.get_logger().warning('fault')\n"
        "say('proxyrun', 'a sentence')\n"
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # which keeps pieces apart
    with ours, theirs:
        subprocess.run([sys.executable, "-u", "-P", "-c", code], stderr=theirs.fileno(), check=True)
        ours.setblocking(False)
        logged, said = ours.recv(1 << 16), ours.recv(1 << 16)
    assert json.loads(logged)["event"] == "fault" and logged.endswith(b"}\n")
    assert said == b"proxyrun: a sentence\n"
