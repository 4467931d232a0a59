"""The log: its format, its writer and reader, and the rewind rules. Knows nothing of processes.

The C++ headers in ``replay/csrc`` are shared by the worker's writer and the device server's reader; this
package gives the tools (proxyd, recoveryctl, tests) the same view through ``replay._replay``, which needs
no PyTorch.
"""

from replay._replay import (
    COMMIT_RING,
    SNAPSHOT_LEASES,
    SNAPSHOT_ORDERS,
    Buffer,
    ByteTable,
    Commit,
    CopiedCommit,
    Log,
    LogError,
    LogFiller,
    LogWriter,
    RemoteError,
    RetiredTemplate,
    RewindError,
    Snapshot,
    SnapshotContents,
    copy_commit,
    copy_records,
    copy_templates,
    create_log,
    describe_row,
    die_with_parent,
    digest,
    process_is_alive,
    process_start_ticks,
)

__all__ = [
    "COMMIT_RING",
    "SNAPSHOT_LEASES",
    "SNAPSHOT_ORDERS",
    "Buffer",
    "ByteTable",
    "Commit",
    "CopiedCommit",
    "Log",
    "LogError",
    "LogFiller",
    "LogWriter",
    "RemoteError",
    "RetiredTemplate",
    "RewindError",
    "Snapshot",
    "SnapshotContents",
    "copy_commit",
    "copy_records",
    "copy_templates",
    "create_log",
    "describe_row",
    "die_with_parent",
    "digest",
    "process_is_alive",
    "process_start_ticks",
]
