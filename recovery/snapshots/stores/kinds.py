"""Kinds of extents in a slot (docs/snapshot-format.md)."""

from __future__ import annotations

BUFFER = 1
GENERATOR = 2
MANIFEST = 3
"""Id 0: the commit's row in the log; id 1: the manifest itself."""
CLIENT_STATE = 4
LOG = 5
OTHER_HOLDERS = 6
"""JSON: handle of a buffer -> [rank, handle] of who writes the same bytes."""

ROW, CONTENT = 0, 1
"""Ids of MANIFEST extents."""
