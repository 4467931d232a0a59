"""What a planned move answers when something else comes between."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from understudy.recovery.config.settings import DeviceSpec, Settings
from understudy.recovery.membership.settings import MembershipSettings
from understudy.recovery.planning.planner import Plan, PlanName, Rewind
from understudy.recovery.upkeep.planned_moves import PlannedMoves


def moved_meanwhile(session: Any) -> Any:
    """A coordinator whose recovery brings the rank to where it was to go, while a snapshot is waited for."""
    stays = Plan(PlanName.REWIND_IN_PLACE, "nothing is broken", (Rewind(1, 6),))

    def way_to_move(_: Any) -> Plan:
        session.destination, session.destination_host = None, ""  # as on arrival
        return stays

    return SimpleNamespace(way_to_move=way_to_move, recovering=False)


def test_a_move_that_a_recovery_has_carried_out_meanwhile_is_not_refused() -> None:
    log = SimpleNamespace(snapshot_floor=1)
    session: Any = SimpleNamespace(
        rank=1, job=SimpleNamespace(name="job", recoveries=[]), active=True, log=log,
        destination=None, destination_host="c",
    )  # fmt: skip

    def hasten() -> None:
        log.snapshot_floor += 1

    settings = Settings(DeviceSpec("cpu", 1), Path("unused"), membership=MembershipSettings("a"))
    snapshots: Any = {"job": SimpleNamespace(hasten=hasten)}
    moves = PlannedMoves(
        settings, cast(Any, None), cast(Any, None), {}, snapshots, spans={}, note=lambda: None
    )
    told = asyncio.run(moves.carry_out(session, moved_meanwhile(session)))
    assert "a recovery came between" in told
