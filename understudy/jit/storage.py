"""Writes the shards of a job into the directory that its ranks share (paper 001 §3.2).

A save is made in a hidden folder: payload, then metadata, each durable. One rename lets it count, and makes
it count whole; a crash before leaves remains, which their rank removes when it comes again. No rank waits for
another, and no collective is called: a rank that saves knows that some others hang or are dead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from understudy.durable import make_folder, sync_folder

from . import digest, making, reading
from .assembly import Attempt, Save, absent, assemble
from .choosing import Choice, exported, judge, own_job, step_of, wait_for_shards
from .identity import Identity, JitError, is_number, shown
from .making import HalfMade, Maker
from .reading import ANNOUNCED, ATTENDANCE, DAMAGED, JOB, METADATA, PAYLOAD, Directory, NotWhole

__all__ = ["Choice", "ShardDirectory", "wait_for_shards"]
_KEPT_ATTEMPTS = 4
_TRIES = 100
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
_OWN_CHECKPOINT = "the script's own checkpoint"


class ShardDirectory:
    """One rank's hold on the directory. `remarks`: what the last `choose` passed over, a sentence each."""

    def __init__(self, path: str | os.PathLike[str], identity: Identity) -> None:
        """Makes the directory, for its owner alone. Removes what a crash of this rank left half made.

        Raises JitError for another job's or user's directory, and for one that cannot be written.
        """
        self.identity = identity
        self.remarks: tuple[str, ...] = ()
        self._number: int | None = None
        with _told(f"The directory {os.fspath(path)} cannot be used for checkpoints, give another one"):
            os.makedirs(path, 0o700, exist_ok=True)
            self.path = Path(path).resolve(strict=True)
            self._maker = Maker(self.path, identity.rank, self._is_own)
            if self.path.stat().st_uid == os.geteuid():  # before anything is made: the disk may be full
                self._maker.remove_remains()
            self._directory = Directory(self.path, self._owner())
            self._claim()

    def announce(self) -> None:
        """Write down this attempt's world size and this rank's shard, so that all shards are known.

        Raises JitError.
        """
        if self._number is not None:
            return
        who = self.identity
        with _told(f"Rank {who.rank} cannot announce itself in {self.path}"):
            for part in (ANNOUNCED, ATTENDANCE):
                make_folder(self.path / part)
            number = self._numbered()
            fields = {"format": reading.FORMAT, "rank": who.rank, "shard": who.shard, "host": who.host}
            record = self.path / ANNOUNCED / f"{number:06d}" / f"rank-{who.rank}.json"
            self._maker.publish(record, reading.sealed(fields))
            (self.path / ATTENDANCE / f"{number:06d}").mkdir(0o700, exist_ok=True)
        self._number = number

    @property
    def meeting_place(self) -> Path:
        """A folder that the ranks of this attempt share, and no other attempt. Raises JitError."""
        self.announce()
        return self.path / ATTENDANCE / f"{self._number:06d}"

    def attend(self, step: int) -> None:
        """Write down that this rank has arrived at a save behind a step. Raises JitError."""
        _refuse_no_step(step)
        folder = self.meeting_place
        with _told(f"Rank {self.identity.rank} cannot write down in {folder} that it has arrived"):
            name = folder / f"rank-{self.identity.rank}.step-{step}"
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))

    def save(self, step: int, write: Callable[[Path], None], reason: str) -> Path:
        """This rank's state behind a step; answers where the payload lies.

        `write`: makes a file or a folder at the path that it is given, whose last part is always "payload"
        (torch.save writes it into the file, and replicas are compared by their bytes). Raises what `write`
        raises, and JitError; nothing counts then, and what was there before does. Older saves of this rank
        are removed, if a complete step is newer.
        """
        _refuse_no_step(step)
        self.announce()
        with contextlib.suppress(JitError):  # the save is worth more than the list of who arrived
            self.attend(step)
        with self._begun(step) as half:
            write(half.path / PAYLOAD)
            final = self._finish(half.path, step, None, PAYLOAD, reason)
        with contextlib.suppress(OSError, NotWhole):  # the next save tries again
            self._remove_older(step)
        return final / PAYLOAD

    def saved(self, path: str | os.PathLike[str], step: int) -> None:
        """A checkpoint that the script has written at `path` itself competes by its step, in its place.

        One that holds the whole state is told by a rank of each shard. It is read, for its digest. The script
        may remove it, or write over it, when it likes: then it counts no more. Raises JitError.
        """
        _refuse_no_step(step)
        self.announce()
        with self._told_of(step):
            place = Path(path).resolve(strict=True)
        with self._begun(step) as half:
            final = self._finish(half.path, step, place.parent, place.name, _OWN_CHECKPOINT)
        with contextlib.suppress(OSError):
            self._remove_replaced(final.name, place)

    def choose(self, also: Sequence[str | os.PathLike[str]] = ()) -> Choice | None:
        """The newest step that all shards have, with this rank's payload; None to begin at the beginning.

        `also`: directories that `recoveryctl snapshots export` wrote, which compete by their step. The
        payload of one replica of every shard is read, and compared with its digest.
        Raises JitError where the directory cannot be read.
        """
        judgement = judge(self._directory, self._present(), shard=self.identity.shard)
        self._note_damage(judgement.damaged)
        export, remarks = exported(also, self.identity, self._directory.owner)
        self.remarks = (*judgement.remarks, *remarks)
        choice = judgement.choice
        if export is not None and (choice is None or export.step > choice.step):
            choice = export
        return None if choice is None else replace(choice, remarks=self.remarks)

    def _present(self) -> Attempt:
        """This attempt: as it has been announced, or, before that, what this rank alone knows of it."""
        who = self.identity
        for number in reversed(self._directory.numbers()):
            if self._directory.header(number) == (who.attempt, who.world_size):
                announced = self._directory.attempt(number)
                return replace(announced, shards={**announced.shards, who.rank: who.shard})
        return Attempt(-1, who.attempt, who.world_size, {who.rank: who.shard}, {})

    def _owner(self) -> int:
        """The uid of what this process writes here, which need not be its own (NFS, containers)."""
        status = self.path.stat()
        with self._maker.file("probe") as (_, number):
            owner = os.fstat(number).st_uid
        if status.st_uid != owner:
            raise JitError(
                f"The directory {self.path} belongs to uid {status.st_uid}, and what this process writes to "
                f"{owner}; give a directory of its own."
            )
        if status.st_mode & 0o002:
            raise JitError(
                f"Everybody may write into {self.path}; take that right away, or give another one."
            )
        return owner

    def _claim(self) -> None:
        """Raises JitError where another job came first."""
        who, path = self.identity, self.path / JOB
        if not os.path.lexists(path):
            text = reading.sealed({"format": reading.FORMAT, "job": who.job})
            self._maker.publish(path, text, first=True)
        try:
            job = self._directory.job()
        except NotWhole as problem:
            raise JitError(
                f"Nobody knows whose the directory {self.path} is: {problem}; give another one."
            ) from None
        if job != who.job:
            raise JitError(
                f"The directory {self.path} belongs to the job {shown(job)}, and this is {shown(who.job)}; "
                "give another directory, or that job's name (job=) to go on with it."
            )

    def _numbered(self) -> int:
        """The number of this attempt, which its first rank draws. Raises JitError, OSError."""
        who, place = self.identity, self.path / ANNOUNCED
        text = reading.sealed(
            {"format": reading.FORMAT, "attempt": who.attempt, "world_size": who.world_size}
        )
        for _ in range(_TRIES):
            numbers = self._directory.numbers()
            for number in reversed(numbers):
                name, world = self._directory.header(number)
                if name == who.attempt and world == who.world_size:
                    return number
                if name == who.attempt:
                    raise JitError(
                        f"Attempt {shown(name)} has {world} ranks, and {who.world_size} by rank {who.rank}; "
                        "give each start of the job an attempt of its own."
                    )
            number = max(numbers, default=0) + 1
            if self._drawn(place / f"{number:06d}", text):
                with contextlib.suppress(OSError):
                    self._remove_attempts(numbers)
                return number
        raise JitError(f"No number for this attempt was free in {place}; give another directory.")

    def _drawn(self, place: Path, text: bytes) -> bool:
        """False where another rank was faster, perhaps for the same attempt. Raises OSError."""
        with self._maker.folder("attempt") as half:
            making.write_new(half.path / "attempt.json", text)
            sync_folder(half.path)
            try:
                os.rename(half.path, place)
            except OSError as error:
                if error.errno in _TAKEN:
                    return False
                raise
        sync_folder(place.parent)
        return True

    def _begun(self, step: int) -> HalfMade:
        with self._told_of(step):
            self._maker.remove_remains()
            return self._maker.folder("save")

    def _told_of(self, step: int) -> contextlib.AbstractContextManager[None]:
        return _told(f"Rank {self.identity.rank} could not save step {step} in {self.path}")

    def _finish(self, folder: Path, step: int, root: Path | None, payload: str, reason: str) -> Path:
        """Make a payload durable, write its metadata, and let it count. Raises JitError."""
        with self._told_of(step):
            files = self._durable(folder if root is None else root, payload, step)
            text = self._metadata(step, root, payload, reason, files)
            making.write_new(folder / METADATA, text)
            sync_folder(folder)
            shard, rank = self.identity.shard, self.identity.rank
            final = self.path / reading.folder_name(step, shard, rank, making.unique())
            os.rename(folder, final)
            try:
                sync_folder(self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.rename(final, folder)  # whoever is told of an error finds nothing that counts
                raise
            return final

    def _durable(self, root: Path, payload: str, step: int) -> dict[str, digest.FileDigest]:
        try:
            number = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                files = digest.make_durable(number, payload)
                os.fsync(number)
            finally:
                os.close(number)
        except (FileNotFoundError, digest.Unfit) as error:
            raise JitError(
                f"The checkpoint of step {step} was to be at {root / payload}, and does not count: {error}."
            ) from error
        if not files:
            raise JitError(
                f"The checkpoint of step {step} at {root / payload} is an empty folder; write files."
            )
        return files

    def _metadata(
        self, step: int, root: Path | None, payload: str, reason: str, files: dict[str, digest.FileDigest]
    ) -> bytes:
        number, away = self._number or 0, {}
        if root is None:
            arrivals = {**self._directory.arrivals(number), self.identity.rank: step}
            away = absent(step, self._directory.attempt(number), arrivals)
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        text = reading.metadata_of(self.identity, step, reason, root, payload, files, away, versions)
        if len(text) > reading.MOST_METADATA:
            raise JitError(
                f"The checkpoint of step {step} has {len(files)} files, more than its metadata can name; "
                "write fewer and larger ones."
            )
        return text

    def _is_own(self, rank: int) -> bool:
        """Whose remains and old saves this rank removes: its own, and those of ranks that are no more."""
        world = self.identity.world_size
        return rank == self.identity.rank or (rank >= world and rank % world == self.identity.rank)

    def _own_names(self) -> list[str]:
        places = ((name, reading.step_and_rank(name)) for name in self._directory.names())
        return [name for name, place in places if place and self._is_own(place[1])]

    def _remove_older(self, step: int) -> None:
        """What this rank has behind the newest complete step, which is not one that is known to be damaged.

        A step beyond the one just saved does not count here: the job has turned away from it.
        """
        older = [name for name in self._own_names() if step_of(name) < step]
        if not older:
            return
        lowest = min(map(step_of, older))
        names = [name for name in self._directory.names() if lowest < step_of(name) <= step]
        saves, _ = own_job(self._directory, *self._directory.saves(names))
        whole = [save for save in saves if not save.periodic and self._is_there(save)]
        candidates = assemble(whole, self._directory.attempts(), self._present()).candidates
        newest = candidates[0].step if candidates else -1
        for name in older:
            if step_of(name) < newest:
                self._maker.discard(self.path / name)
                making.remove(self.path / DAMAGED / name)

    def _is_there(self, save: Save) -> bool:
        """By its sizes: there is no time to read payloads when a job is about to end."""
        try:
            self._directory.verify(save, contents=False)
        except NotWhole:
            return False
        return not os.path.lexists(self.path / DAMAGED / save.name)

    def _note_damage(self, names: Iterable[str]) -> None:
        """So that no rank removes an older save because of it, one that has not read its payload included."""
        with contextlib.suppress(OSError):
            for name in names:
                make_folder(self.path / DAMAGED)
                (self.path / DAMAGED / name).touch(0o600)

    def _remove_replaced(self, new: str, place: Path) -> None:
        """Records of this rank for checkpoints that are gone, or that another has been written over."""
        for save in self._directory.saves(self._own_names())[0]:
            if save.periodic and save.name != new and (save.path == place or not os.path.lexists(save.path)):
                self._maker.discard(self.path / save.name)

    def _remove_attempts(self, numbers: Sequence[int]) -> None:
        """Old attempts of which nothing is left, if all that is left can be read."""
        if not (old := numbers[:-_KEPT_ATTEMPTS]):
            return
        saves, unread = self._directory.saves()
        used = {save.attempt for save in saves}
        for number in () if unread else old:
            if self._directory.header(number)[0] not in used:
                self._maker.discard(self.path / ANNOUNCED / f"{number:06d}")
                making.remove(self.path / ATTENDANCE / f"{number:06d}")


@contextmanager
def _told(what: str) -> Iterator[None]:
    """An OSError as a JitError that says what could not be done."""
    try:
        yield
    except OSError as error:
        raise JitError(f"{what}: {error}.") from error


def _refuse_no_step(step: int) -> None:
    if not is_number(step):
        raise JitError(f"A step is a whole number from 0 to 2^53, and this is {step!r:.40}.")
