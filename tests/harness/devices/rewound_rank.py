"""One rank of the rewind machine: an executor that can be stopped, brought back and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from executor_harness import Harness

from understudy.proxy_server._server import Executor
from understudy.replay import Buffer, RemoteError

SNAPSHOT_BYTES = 64 << 20
CALL_ERROR = 3
"""DrillKind: the executor stops at the record that fails."""
OPTIMIZER_PHASE = 1


class RewoundRank:
    """A log with its writer and executor; `protected` ones can go back."""

    def __init__(self, protected: bool, optimizer_preimages: bool) -> None:
        self.harness = Harness(
            protect=protected,
            optimizer_preimages=optimizer_preimages,
            world=2 if protected else 1,
            snapshot_bytes=SNAPSHOT_BYTES if protected else 0,
        )
        self.log = self.harness.log
        self._optimizer_preimages = optimizer_preimages
        self.restored_commit = 0
        self._templates: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}

    def close(self) -> None:
        """End it; its files go."""
        self.harness.__exit__(None, None, None)

    # ------------------------------------------------------------------ the program
    def append(self, kind: int, aux: int, body: Sequence[int] = ()) -> None:
        """A record that answers nothing."""
        self.harness.writer.append(kind, aux, list(body))

    def call(self, kind: int, aux: int, body: Sequence[int] = ()) -> bytes | str:
        """A record that answers; the answer, or what the error says."""
        try:
            return self.harness.writer.call(kind, aux, list(body))
        except RemoteError as error:
            return str(error)

    def template(self, name: str, key: Sequence[int], outputs: Sequence[int]) -> int:
        """As a worker does, one for each kind of call."""
        wanted = (name, tuple(key), tuple(outputs))
        if wanted not in self._templates:
            self._templates[wanted] = self.harness.template(name, list(key), list(outputs))
        return self._templates[wanted]

    # ------------------------------------------------------------------ standing still
    def settle(self) -> None:
        """Wait until every record is done, and every snapshot that was ordered."""
        self.harness.run_all()
        self.harness.wait(lambda: self.log.snapshot_begun in (0, self._newest_serial()), "took no snapshot")

    def stop_at(self, step: int, call: int) -> None:
        """Run a parked rank up to a record: the call fails there."""
        self.log.add_drill(CALL_ERROR, step, call)
        self.resume()
        self.harness.wait(lambda: self.harness.executor.state == "parked", f"did not stop at {step}/{call}")

    def park(self) -> None:
        """Stop it between two records."""
        self.harness.executor.park()

    def resume(self) -> None:
        """Let it run."""
        self.harness.executor.resume()

    # ------------------------------------------------------------------ going back
    def kept_commits(self) -> list[int]:
        """Whose log is still there, oldest first, as recovery/host/evidence.py and planning/cuts.py say."""
        oldest = max(self.log.floor_commit, self.restored_commit)
        kept = [commit.number for commit in self.log.commits() if commit.number >= oldest]
        return kept if oldest or self.log.freed_segments or self.log.snapshots() else [0, *kept]

    def commits_to_rewind_to(self) -> list[int]:
        """Those that recovery/planning/planner.py would choose from; parked."""
        known = {commit.number for commit in self.log.commits() if commit.has_manifest}
        known |= {0, *self.snapshots_in_reach()}
        kept = [commit for commit in self.kept_commits() if commit in known]
        if self._optimizer_preimages:
            return kept
        in_optimizer = self.log.phase == OPTIMIZER_PHASE
        return [] if in_optimizer else [commit for commit in kept if commit == self.log.commit_count]

    def snapshots_in_reach(self) -> list[int]:
        """Commits."""
        return [s.commit.number for s in self.log.snapshots() if s.serial >= self.log.snapshot_floor]

    def can_be_rebuilt_at(self, commit: int, replica: RewoundRank) -> bool:
        """Whether a shadow or the replica holds each content, by digest."""
        if commit == 0:
            return True
        entry = next(known for known in self.log.commits() if known.number == commit)
        if not (entry.complete and entry.has_manifest):
            return False
        missing = [buffer.handle for buffer in self._without_shadow(commit)]
        if not missing:
            return True
        if not any(known.number == commit and known.has_manifest for known in replica.log.commits()):
            return False
        ours = self.log.digests(commit, missing)
        return None not in ours and ours == replica.log.digests(commit, missing)

    def _without_shadow(self, commit: int) -> list[Buffer]:
        return [] if commit == 0 else [b for b in self.log.manifest(commit) if not b.shadowed]

    def rebuild_from(self, replica: RewoundRank, commit: int) -> int:
        """A fresh server; what has no shadow comes from a replica that stands there.  Answers the bytes."""
        executor = self._replace_server()
        executor.restore(commit)
        missing = self._without_shadow(commit)
        source = replica.harness.executor
        copied = 0
        for buffer in missing:
            if source.has_content(buffer.handle):
                content = source.read_state(buffer.handle, 0, buffer.bytes)
                executor.adopt_replica(buffer.handle, 0, content)
                copied += len(content)
            else:
                executor.mark_lost(buffer.handle)
        executor.complete_restore([(b.handle, b.digest) for b in missing if b.digest is not None])
        self.restored_commit = commit
        return copied

    def reload(self, commit: int, fresh: bool) -> None:
        """From a snapshot, in the same server or in a fresh one."""
        self.log.floor_commit = min(self.log.floor_commit, commit)
        executor = self._replace_server() if fresh else self.harness.executor
        executor.restore_snapshot(commit)
        self.restored_commit = commit

    def content(self, sizes: Mapping[int, int]) -> dict[int, bytes]:
        """Of buffers of these sizes (bytes); parked."""
        executor = self.harness.executor
        for handle, size in sizes.items():
            assert executor.buffer_bytes(handle) == size, f"buffer {handle}"
        return {handle: executor.read_state(handle, 0, size) for handle, size in sizes.items()}

    def _newest_serial(self) -> int:
        return max([s.serial for s in self.log.snapshots()] + [self.log.snapshot_failed])

    def _replace_server(self) -> Executor:
        self.harness.executor.detach()
        self.harness.executor = self.harness.new_executor()
        return self.harness.executor
