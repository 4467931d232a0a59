"""What must hold at the end of a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.recovery.job.coordinator import MOST_ROUNDS

if TYPE_CHECKING:
    from simulation.world import World

ROUNDS_OF_A_MOVE = 4


def judge(world: World) -> None:
    """Who was lost, and how many rounds it took; a move is no fault that anybody may be lost for."""
    disturbances = sum(world.faults.values())
    for log in world.logs:
        why = log.lost_because
        if log.session_state == 1 and not disturbances:
            raise world.violation(f"rank {log.rank} was lost though nothing happened: {why}")
        if log.session_state == 1:
            fine = world.is_excused(why) or any(why.startswith(reason[:900]) for reason in world.given_up)
            if why.startswith("recovery did not succeed"):
                fine = disturbances >= MOST_ROUNDS - 2
            if not fine:
                raise world.violation(f"rank {log.rank} was lost without need: {why}")
        elif log.session_state == 0 and not world.may_be_open(log):
            raise world.violation(f"rank {log.rank} neither ended nor was lost")
    rounds = 2 * disturbances + world.shape.world + world.standings + world.refusals
    if world.job.generation > rounds + ROUNDS_OF_A_MOVE * world.moves.begun:
        raise world.violation(f"{world.job.generation} rounds for {disturbances} faults")
    world.moves.check()
