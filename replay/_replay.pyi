class LogError(RuntimeError): ...
class RetiredTemplate(LogError): ...
class RemoteError(RuntimeError): ...
class RewindError(RuntimeError): ...

COMMIT_RING: int
SNAPSHOT_LEASES: int

class Commit:
    number: int
    log_offset: int
    record_index: int
    step: int
    call: int
    complete: bool
    has_manifest: bool
    optimizer: bool
    communicators: list[tuple[int, int, int]]
    members: list[int]

class Snapshot:
    serial: int
    bytes: int
    seconds: float
    commit: Commit

class SnapshotContents:
    commit: Commit
    row: bytes
    manifest: bytes
    buffers: list[tuple[int, int, int, int]]
    generators: list[tuple[int, int, int, int]]

class Buffer:
    handle: int
    bytes: int
    digest: int | None
    shadowed: bool

def create_log(
    directory: str,
    *,
    rank: int = 0,
    world: int = 1,
    segment_bytes: int = ...,
    segment_count: int = ...,
    dictionary_bytes: int = ...,
    reply_bytes: int = ...,
    shadow_bytes: int = ...,
    snapshot_bytes: int = ...,
    proxyd_pid: int = 0,
    proxyd_start_ticks: int = 0,
    proxyd_grace_s: int = 0,
) -> None: ...
def digest(content: bytes) -> int: ...
def process_start_ticks(pid: int) -> int: ...
def process_is_alive(pid: int, start_ticks: int) -> bool: ...

class Log:
    rank: int
    world: int
    segment_bytes: int
    segment_count: int
    tail: int
    tail_index: int
    dictionary_bytes: int
    dictionary_begin: int
    dictionary_tail: int
    cursor: int
    cursor_index: int
    phase: int
    step: int
    worker_steps: int
    call: int
    progress_ns: int
    freed_segments: int
    backpressure: int
    in_collective: int
    degraded: int
    live_buffers: int
    live_bytes: int
    undo_bytes: int
    shadow_used_bytes: int
    replies_compared: int
    replies_different: int
    median_calls_per_step: int
    median_bytes_per_step: int
    commit_count: int
    session_state: int
    error_kind: int
    validate_step: int
    validated_step: int
    validations_failed: int
    validation_message: str
    recent_calls: list[int]
    device_lost: int
    device_message: str
    wait_sequence: int
    waits_for: tuple[int, int]
    error_index: int
    error_operator: str
    error_message: str
    floor_commit: int
    snapshot_used_bytes: int
    snapshot_failed: int
    snapshots_taken: int
    snapshot_ns: int
    snapshot_begun: int
    snapshot_floor: int
    snapshot_suspended: bool
    snapshot_limit: int
    snapshot_ordered: int
    proxyd_pid: int
    def __init__(self, directory: str) -> None: ...
    def lose(self, message: str) -> None: ...
    def describe_snapshot(self, serial: int) -> None: ...
    def order_snapshot(self, serial: int, step: int | None = None) -> None: ...
    def supervise(self, pid: int, start_ticks: int) -> None: ...
    def snapshots(self) -> list[Snapshot]: ...
    def snapshot_contents(self, serial: int) -> SnapshotContents: ...
    def snapshot_holds(self, serial: int) -> bool: ...
    def lease_snapshots(self, serials: list[int]) -> None: ...
    def commits(self) -> list[Commit]: ...
    def manifest(self, commit: int) -> list[Buffer]: ...
    def digests(self, commit: int, handles: list[int]) -> list[int | None]: ...
    def add_drill(self, kind: int, step: int, call: int) -> None: ...
    def drills(self) -> list[tuple[int, int, int, int, int, int]]: ...
    def drill_done(self, slot: int) -> None: ...
    def started(self) -> list[tuple[int, int, int, int]]: ...
    def dump(self, first: int | None = None, count: int | None = None) -> list[dict[str, object]]: ...
    @staticmethod
    def now_ns() -> int: ...

class LogWriter:
    usable: bool
    records: int
    def __init__(self, directory: str) -> None: ...
    def free_later(self, handle: int) -> None: ...
    def put_template(self, name: str, key: list[int], out: list[int]) -> int: ...
    def append(self, kind: int, aux: int, body: list[int]) -> int: ...
    def call(self, kind: int, aux: int, body: list[int]) -> bytes: ...
    def close(self) -> None: ...

class ByteTable:
    epoch: int
    oldest: int
    undo_bytes: int
    live_bytes: int
    def __init__(self) -> None: ...
    def protect(self, on: bool) -> None: ...
    def preimages(self, on: bool) -> None: ...
    def create(self, handle: int, content: bytes) -> None: ...
    def write(self, handle: int, content: bytes) -> None: ...
    def replace(self, handle: int, content: bytes) -> None: ...
    def read(self, handle: int) -> bytes: ...
    def free(self, handle: int) -> None: ...
    def commit(self) -> int: ...
    def release(self, floor: int) -> None: ...
    def seal(self) -> None: ...
    def rewind(self, target: int) -> int: ...
    def start_at(self, number: int) -> None: ...
    def adopt(self, handle: int, content: bytes, available: bool) -> None: ...
    def rows(self) -> list[tuple[int, bytes, int, bool]]: ...
    def handles(self) -> list[int]: ...
