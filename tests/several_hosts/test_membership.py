"""A proxyd that has jobs to adopt starts whatever its certificates and etcd are like; any other does not."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from etcd_server import free_port

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.errors import BadInput
from understudy.recovery.config.cluster_options import parse_endpoints
from understudy.recovery.membership.membership import Membership
from understudy.recovery.membership.network.certificates import issue, make_authority
from understudy.recovery.membership.settings import MembershipSettings

NOW = datetime.now(UTC)


def membership(settings: MembershipSettings, *, must: bool) -> Membership:
    return Membership(settings, "/socket", pb.Node, list, must=must)


def expired(folder: Path, scheme: str) -> MembershipSettings:
    """An etcd that is not there, and a certificate of yesterday."""
    make_authority(folder, "tests")
    issue(folder, "a", days=1, now=NOW - timedelta(days=2))
    endpoints = parse_endpoints(f"{scheme}://127.0.0.1:{free_port()}")
    place = f"127.0.0.1:{free_port()}"
    return MembershipSettings("a", "tests", endpoints, place, place, folder)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_proxyd_with_jobs_to_adopt_tells_in_status_what_keeps_it_from_other_hosts(
    tmp_path: Path, scheme: str
) -> None:
    async def main() -> None:
        made = membership(expired(tmp_path, scheme), must=False)
        await made.start()
        status = made.status()
        assert "does not answer" in status.trouble and status.trouble_since_ms > 0
        assert "a.pem has expired on" in status.note
        assert made.record().address == ""  # nobody is to look for it there
        await made.leave()

    asyncio.run(main())


def test_proxyd_without_jobs_ends_with_the_sentence_instead(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(BadInput, match=r"a\.pem has expired on"):
            membership(expired(tmp_path, "http"), must=True)
        with pytest.raises(
            BadInput, match=r"etcd at .* does not answer: .*; start it first, or check --etcd"
        ):
            settings = MembershipSettings("a", endpoints=parse_endpoints(f"http://127.0.0.1:{free_port()}"))
            await membership(settings, must=True).start()

    asyncio.run(main())


@pytest.mark.parametrize(("days", "told"), [(3, "expires"), (200, "")])
def test_certificate_that_ends_soon_is_told_in_time(tmp_path: Path, days: int, told: str) -> None:
    make_authority(tmp_path, "tests")
    issue(tmp_path, "a", days=days)

    async def main() -> None:
        settings = MembershipSettings("a", certificates=tmp_path)
        note = membership(settings, must=True).status().note
        assert told in note and bool(note) == bool(told)

    asyncio.run(main())
