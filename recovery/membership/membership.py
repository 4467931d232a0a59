"""A proxyd's part in its cluster: registered itself, and with an eye on the others."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import structlog

from recovery.background import BackgroundTasks
from recovery.control import pb
from recovery.membership.embedded import EmbeddedStore
from recovery.membership.hosts import Hosts, Nobody, Peers
from recovery.membership.records import VERSION, Keys
from recovery.membership.registration import NameTaken, Registration
from recovery.membership.settings import MembershipSettings
from recovery.membership.store import Store, StoreError
from recovery.membership.this_host import this_machine
from recovery.settings import BadInput

log = structlog.get_logger()


class Membership:
    """Of one proxyd, from `start` to `leave`."""

    def __init__(
        self,
        settings: MembershipSettings,
        socket: str,
        node: Callable[[], pb.Node],
        ranks: Callable[[], list[pb.HostRank]],
    ) -> None:
        """`node` and `ranks`: what this host has and runs now."""
        self._settings = settings
        self._node = node
        self._ranks = ranks
        machine = this_machine()
        self._fixed = pb.HostRecord(
            version=VERSION, name=settings.host, boot_id=machine.boot_id, socket=socket,
            instance=secrets.token_hex(8), kernel=machine.kernel, processor=machine.processor,
            processor_features=machine.features,
        )  # fmt: skip
        self._store = _store(settings)
        self._background = BackgroundTasks("membership")
        keys = Keys(settings.cluster)
        self.registration = Registration(self._store, keys, self.record)
        self.hosts = Hosts(self._store, keys, settings.host, _peers(settings))

    async def start(self, *, must: bool) -> None:
        """Register, and go on doing so; raises BadInput if it is not possible and `must` be."""
        try:
            await self.registration.register()
        except StoreError as problem:
            if must:
                await self._store.close()
                advice = "" if isinstance(problem, NameTaken) else "; start it first, or check --etcd"
                raise BadInput(f"{problem}{advice}") from problem
            self.registration.note_trouble(problem)
        for work in (self.registration.run(), self.hosts.followed.run(), self.hosts.run()):
            self._background.start(work)

    async def leave(self) -> None:
        """Told to stop: this host is not one that was lost."""
        await self._background.cancel()
        try:
            await self.registration.leave()
        except StoreError as problem:
            log.warning("could not take leave of the cluster", problem=str(problem))
        await self._store.close()

    def record(self) -> pb.HostRecord:
        """What this host tells of itself now."""
        record = pb.HostRecord()
        record.CopyFrom(self._fixed)
        record.node.CopyFrom(self._node())
        record.ranks.extend(self._ranks())
        return record

    def status(self) -> pb.Membership:
        """For `recoveryctl status`."""
        return pb.Membership(
            host=self._settings.host, cluster=self._settings.cluster,
            store=",".join(endpoint.target for endpoint in self._settings.endpoints),
            trouble=self.registration.trouble, trouble_since_ms=self.registration.trouble_since_ms,
        )  # fmt: skip

    async def listing(self) -> pb.HostList:
        """For `recoveryctl hosts`."""
        standings, problems = await self.hosts.standings()
        return pb.HostList(membership=self.status(), hosts=standings, problems=problems)


def _store(settings: MembershipSettings) -> Store:
    if not settings.endpoints:
        return EmbeddedStore()
    from recovery.membership.etcd import EtcdStore  # its libraries are seldom needed

    return EtcdStore(settings.endpoints)


def _peers(settings: MembershipSettings) -> Peers:
    return Nobody()
