"""Lines of proxyd's log."""

from __future__ import annotations

import json
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
