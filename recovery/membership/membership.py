"""A proxyd's part in its cluster: registered itself, and with an eye on the others."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

import grpc
import grpc.aio
import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.background import BackgroundTasks
from understudy.recovery.base.errors import BadInput
from understudy.recovery.base.timing import TIMING, Timing
from understudy.recovery.machine import criu
from understudy.recovery.membership.hosts import Hosts, Nobody, Peers
from understudy.recovery.membership.network.certificates import Credentials, load
from understudy.recovery.membership.network.data_probe import DataProbe
from understudy.recovery.membership.network.endpoint import AddService, HostsService, listen
from understudy.recovery.membership.network.links import Links
from understudy.recovery.membership.network.peers import TlsPeers
from understudy.recovery.membership.records import VERSION, Keys
from understudy.recovery.membership.registration import NameTaken, Registration
from understudy.recovery.membership.settings import MembershipSettings
from understudy.recovery.membership.stores.embedded import EmbeddedStore
from understudy.recovery.membership.stores.store import ClusterStore, ClusterStoreError
from understudy.recovery.membership.this_host import this_machine
from understudy.recovery.planning.agreement import Vote

log = structlog.get_logger()

RENEW_BEFORE = timedelta(days=14)
"""A certificate that ends sooner is told of."""


class Membership:
    """The part that one proxyd has in its cluster, from `start` to `leave`."""

    def __init__(
        self,
        settings: MembershipSettings,
        socket: str,
        node: Callable[[], pb.Node],
        ranks: Callable[[], list[pb.HostRank]],
        *,
        must: bool,
        timing: Timing = TIMING,
    ) -> None:
        """`node` and `ranks`: what this host has and runs now.

        `must`: what is wrong with certificates or etcd ends `start`, rather than be told in status.  Raises
        BadInput.
        """
        self._settings = settings
        self._node = node
        self._ranks = ranks
        self._must = must
        self._problem = ""
        self._credentials: Credentials | None = None
        with self._told():
            if settings.certificates is not None:
                self._credentials = load(settings.certificates, settings.host)
        machine = this_machine()
        self._fixed = pb.HostRecord(
            version=VERSION, name=settings.host, boot_id=machine.boot_id, socket=socket,
            address=settings.address if self._credentials is not None else "",
            instance=secrets.token_hex(8), kernel=machine.kernel, processor=machine.processor,
            processor_features=machine.features, data_address=settings.data_address,
            criu=_version_of_criu() if settings.endpoints else "",
        )  # fmt: skip
        self._store = _store(settings, self._credentials)
        self._peers = _peers(settings, self._credentials)
        self._server: grpc.aio.Server | None = None
        self._background = BackgroundTasks("membership", timing)
        keys = Keys(settings.cluster)
        self.registration = Registration(self._store, keys, self.record, timing=timing)
        self.hosts = Hosts(self._store, keys, settings.host, self._peers)
        listens = bool(settings.listen) and self._credentials is not None
        self.links = Links(self._registered, self._credentials if listens else None)
        self.data_probe: DataProbe | None = None
        """Who reaches whom over the data network; None: other hosts cannot be asked."""
        if listens and self._credentials is not None:
            self.data_probe = DataProbe(
                settings.host, settings.data_address, self._credentials, self._registered, self.links
            )

    async def start(self, services: Sequence[AddService] = ()) -> None:
        """Listen, register, and go on doing so; raises BadInput.

        `services`: what else other hosts may ask.
        """
        try:
            with self._told():
                if self._settings.listen and self._credentials is not None:
                    service = HostsService(self._settings.cluster, self.record, self._reach)
                    probe = [self.data_probe.add_to] if self.data_probe is not None else []
                    self._server = await listen(
                        self._settings.listen, self._credentials, service, [*services, *probe]
                    )
                if self.data_probe is not None:
                    await self.data_probe.start()
                    self._fixed.data_port = self.data_probe.port
            await self._register()
        except BadInput:
            await self._close()
            raise
        for work in (self.registration.run(), self.hosts.followed.run(), self.hosts.run()):
            self._background.start(work)

    async def _register(self) -> None:
        try:
            await self.registration.register()
        except ClusterStoreError as problem:
            if self._must:
                advice = "" if isinstance(problem, NameTaken) else "; start it first, or check --etcd"
                raise BadInput(f"{problem}{advice}") from problem
            self.registration.note_trouble(problem)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What is wrong in this block is told in status, unless it must not be."""
        try:
            yield
        except BadInput as problem:
            if self._must:
                raise
            log.warning("this host does not talk to others", problem=str(problem))
            self._problem = str(problem)

    async def leave(self) -> None:
        """Told to stop: this host is not one that was lost."""
        await self._background.cancel()
        try:
            await self.registration.leave()
        except ClusterStoreError as problem:
            log.warning("could not take leave of the cluster", problem=str(problem))
        await self._close()

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
            note=self._note(),
        )  # fmt: skip

    async def listing(self) -> pb.HostList:
        """For `recoveryctl hosts`."""
        standings, problems = await self.hosts.standings()
        return pb.HostList(membership=self.status(), hosts=standings, problems=problems)

    @property
    def store(self) -> ClusterStore:
        """What hosts share."""
        return self._store

    @property
    def can_be_asked(self) -> bool:
        """Whether other hosts and this one can ask each other, and share a store."""
        return bool(self._settings.listen and self._settings.endpoints) and self._credentials is not None

    @property
    def here(self) -> str:
        """The name of this host."""
        return self._settings.host

    @property
    def cluster(self) -> str:
        """The cluster that it is a part of."""
        return self._settings.cluster

    def _registered(self, name: str) -> pb.HostRecord | None:
        known, _ = self.hosts.known()
        return known[name].record if name in known else None

    async def _reach(self, name: str) -> Vote:
        """Whether we reach a host that is registered."""
        known, _ = self.hosts.known()
        if name not in known or not isinstance(self._peers, TlsPeers):
            return Vote(None, "that host is not known here")
        return await self._peers.reach(known[name].record)

    def _note(self) -> str:
        if self._credentials is None or self._problem:
            return self._problem
        left = self._credentials.expires - datetime.now(UTC)
        if left > RENEW_BEFORE:
            return ""
        expires = self._credentials.expires.isoformat(" ", "minutes")
        how = "has expired, so no other host talks to this one" if left < timedelta(0) else "expires"
        return f"the certificate of this host {how} ({expires}): issue another, and start proxyd anew"

    async def _close(self) -> None:
        if self._server is not None:
            await self._server.stop(0.2)
        if self.data_probe is not None:
            await self.data_probe.close()
        await self.links.close()
        await self._store.close()


def _version_of_criu() -> str:
    """The version of the CRIU that would move workers here; empty: none can."""
    found = criu.find()
    return found.version_text if found is not None and found.recent else ""


def _store(settings: MembershipSettings, credentials: Credentials | None) -> ClusterStore:
    if not settings.endpoints:
        return EmbeddedStore()
    from understudy.recovery.membership.stores.etcd import EtcdStore  # its libraries are seldom needed

    secret = grpc.ssl_channel_credentials()  # without ours etcd will refuse, and say so in status
    if credentials is not None:
        secret = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    return EtcdStore(settings.endpoints, secret)


def _peers(settings: MembershipSettings, credentials: Credentials | None) -> Peers:
    if not settings.listen or credentials is None:
        return Nobody()
    return TlsPeers(settings.host, credentials)
