"""The snapshot store: whole states of a rank on a file or a raw partition, several under way at a time.

docs/snapshot-format.md says what lies where and what a crash may leave; ``_store.pyi`` documents each call.
"""

from understudy.recovery.snapshots._store import Contents, Entry, Receipt, Store, StoreError, StoreFull

__all__ = ["Contents", "Entry", "Receipt", "Store", "StoreError", "StoreFull"]
