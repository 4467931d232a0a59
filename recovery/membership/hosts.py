"""Who there is: every registered host, and whether it lives, is suspected or lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.membership.records import VERSION, BadRecord, Keys, read, written
from understudy.recovery.membership.stores.followed import Followed
from understudy.recovery.membership.stores.store import (
    ClusterStore,
    ClusterStoreError,
    Delete,
    Put,
    Unchanged,
)
from understudy.recovery.planning.agreement import HostState, Verdict, Vote, judge

log = structlog.get_logger()

LOOK_S = 1.0
"""Between two rounds of asking for a host whose lease has ended."""


class Peers(Protocol):
    """Whom one can ask whether a host is there."""

    async def votes(self, target: pb.HostRecord, others: Mapping[str, pb.HostRecord]) -> Mapping[str, Vote]:
        """What we and each of the others say of a host, by name; within seconds."""


class Nobody:
    """Peers of a proxyd that does not talk to other hosts."""

    async def votes(self, target: pb.HostRecord, others: Mapping[str, pb.HostRecord]) -> Mapping[str, Vote]:
        """Nobody can be asked."""
        return {"": Vote(None, "this proxyd has no --listen")}


@dataclass(frozen=True)
class KnownHost:
    """What the store tells of a host."""

    record: pb.HostRecord
    lease: int
    """0: it has ended."""
    absent_since_ms: int


class Hosts:
    """What one proxyd thinks of all hosts of its cluster."""

    def __init__(
        self,
        store: ClusterStore,
        keys: Keys,
        here: str,
        peers: Peers,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._keys = keys
        self._here = here
        self._peers = peers
        self._wall_clock = wall_clock
        self._verdicts: dict[str, Verdict] = {}
        self.followed = Followed(store, keys.hosts)

    def known(self) -> tuple[dict[str, KnownHost], list[str]]:
        """Every host with a record, by name, and sentences about what cannot be read."""
        by_host: dict[str, dict[str, tuple[bytes, int]]] = {}
        for key, entry in sorted(self.followed.entries.items()):
            name, kind = self._keys.split(key)
            if name:
                by_host.setdefault(name, {})[kind] = entry.value, entry.lease
        found: dict[str, KnownHost] = {}
        problems = []
        for name, kinds in by_host.items():
            if "record" not in kinds:
                continue
            try:
                record = read(kinds["record"][0], pb.HostRecord)
                if record.name != name:
                    raise BadRecord("it is that of another host")
                since = read(kinds["absent"][0], pb.HostAbsence).since_ms if "absent" in kinds else 0
            except BadRecord as problem:
                problems.append(f"what is registered of host {name} is not used: {problem}")
                continue
            found[name] = KnownHost(record, kinds.get("alive", (b"", 0))[1], since)
        return found, problems

    async def run(self) -> None:
        """Judge hosts for ever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """One round: note who gives no sign, and ask the others about them."""
        known, _ = self.known()
        if self.followed.trouble or self._here not in known or not known[self._here].lease:
            self._verdicts.clear()  # who is cut off from the store, or counts as gone itself, has no say
            return
        gone = [host for name, host in known.items() if not host.lease and name != self._here]
        for name in [name for name in self._verdicts if name not in known or known[name].lease]:
            if self._verdicts.pop(name).state is not HostState.ALIVE:
                log.info("a host is back, or has left", host=name)
        await asyncio.gather(*(self._consider(host, known) for host in gone))

    async def _consider(self, host: KnownHost, known: Mapping[str, KnownHost]) -> None:
        name = host.record.name
        if not host.absent_since_ms:
            await self._note_absence(name)
        others = {
            other: one.record for other, one in known.items() if one.lease and other not in (name, self._here)
        }
        votes = await self._peers.votes(host.record, others)
        before = self._verdicts.get(name, Verdict(HostState.ALIVE))
        after = self._verdicts[name] = judge(True, votes, before.rounds)
        if after.state is not before.state:
            log.warning("a host gives no sign", host=name, state=str(after.state), why=after.why)

    async def _note_absence(self, name: str) -> None:
        """So that all hosts tell the same time, which is that of whoever notices it first."""
        absence = pb.HostAbsence(
            version=VERSION, since_ms=int(self._wall_clock() * 1000), noticed_by=self._here
        )
        try:
            await self._store.transact(
                [Unchanged(self._keys.alive(name), 0), Unchanged(self._keys.absent(name), 0)],
                [Put(self._keys.absent(name), written(absence))],
            )
        except ClusterStoreError as problem:
            log.debug("the absence of a host could not be noted", host=name, problem=str(problem))

    async def standings(self) -> tuple[list[pb.HostStanding], list[str]]:
        """For `recoveryctl hosts`: each host, and what of the store cannot be read."""
        known, problems = self.known()
        ages = await asyncio.gather(*(self._age(host) for host in known.values()))
        answers = not self.followed.trouble and None not in ages
        found = [
            self._state_of(name, host, -1.0 if age is None else age, answers)
            for (name, host), age in zip(known.items(), ages, strict=True)
        ]
        return found, problems

    def _state_of(self, name: str, host: KnownHost, age_s: float, answers: bool) -> pb.HostStanding:
        verdict = self._verdicts.get(name, Verdict(HostState.SUSPECTED, "its lease has ended"))
        if not answers:
            verdict = Verdict(HostState.UNKNOWN, "the store does not answer; this is what was known last")
        elif host.lease:
            verdict = Verdict(HostState.ALIVE)
        return pb.HostStanding(
            record=host.record, state=verdict.state, sign_age_s=age_s, why=verdict.why,
            since_ms=0 if host.lease else host.absent_since_ms, here=name == self._here,
        )  # fmt: skip

    async def forget(self, name: str) -> str:
        """Take a lost host off the list; empty, or a sentence why not.  Raises ClusterStoreError.

        Should it come back all the same, it registers as ever.
        """
        known, _ = self.known()
        if name not in known:
            return f"no host {name[:80]} is registered"
        state = self._state_of(name, known[name], -1.0, not self.followed.trouble).state
        if state != HostState.LOST:
            return f"host {name} is {state}: only a host that is lost can be forgotten (recoveryctl hosts)"
        record, alive, absent = self._keys.record(name), self._keys.alive(name), self._keys.absent(name)
        if not await self._store.transact([Unchanged(alive, 0)], [Delete(record), Delete(absent)]):
            return f"host {name} has just come back"
        log.info("a lost host is forgotten", host=name)
        return ""

    async def _age(self, host: KnownHost) -> float | None:
        """Seconds since its last sign, by the store's clock: hosts' may differ.  None: no answer."""
        if not host.lease:
            since = host.absent_since_ms / 1000
            return max(0.0, self._wall_clock() - since) if since else -1.0
        if self.followed.trouble:
            return -1.0
        try:
            left, granted = await self._store.remaining(host.lease)
        except ClusterStoreError:
            return None
        return max(0.0, granted - left) if granted else -1.0
