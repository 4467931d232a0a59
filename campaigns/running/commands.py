"""What is started for a run: the command line of each attempt, and what it finds in its environment."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from understudy.campaigns.planning.faults import Fault, Native
from understudy.campaigns.planning.spec import Campaign
from understudy.campaigns.planning.variants import VARIANTS, Launch, Variant
from understudy.campaigns.programs import training
from understudy.campaigns.programs.own_faults import fired_marker
from understudy.campaigns.programs.plan import NAME, Plan, PlannedFault
from understudy.campaigns.running import environments, peers
from understudy.campaigns.running.manifest import Planned

BIN = Path(sys.executable).parent
REPORT, LOSSES, STORE, PERSIST = "report.json", "losses", "store", "persist"
ENVIRONMENT: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "LOGLEVEL": "INFO",  # torchrun then says what it does when
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # PyTorch 2.13: restarted ranks else find stale addresses
}


def installed(name: str) -> list[str]:
    """One of the installed commands, run by the Python that runs this."""
    return [sys.executable, str(BIN / name)]


def plan_of(campaign: Campaign, run: Planned, faults: Sequence[Fault], folder: Path, store: Path) -> Plan:
    """What the ranks of a run are told."""
    variant, suite = VARIANTS[run.variant], run.suite
    proxied = variant.launch is Launch.PROXY
    return Plan(
        data=suite.data or "",
        model=suite.model or "",
        steps=campaign.steps,
        global_batch=campaign.global_batch,
        seed=run.seed,
        keeps=variant.keeps,
        checkpoint_every=campaign.every(suite),
        max_in_flight=suite.max_in_flight or campaign.max_in_flight,
        folder=str(folder),
        store=str(store),
        device="cuda" if proxied else "cpu",
        collective_timeout=campaign.collective_timeout_s,
        faults=() if proxied else tuple(_planned(fault) for fault in faults),
        text=str(campaign.text.absolute()) if campaign.text else "",
        mnist=str(campaign.mnist.absolute()) if campaign.mnist else "",
    )


def _planned(fault: Fault) -> PlannedFault:
    assert fault.native is not None
    return PlannedFault(fault.step, fault.rank, fault.native.name, fault.place)


def command_of(
    campaign: Campaign, run: Planned, faults: Sequence[Fault], folder: Path, calls: int
) -> Callable[[int], tuple[Sequence[str], int]]:
    """Of each attempt: its words, and the ranks it has. `calls`: of a step, by which records are counted.

    Raises Unavailable for a peer that is not there.
    """
    variant = VARIANTS[run.variant]
    ranks = campaign.ranks
    if variant.launch is Launch.PEER:
        environment = environments.make(variant.environment)
        words = peers.command(variant.environment, environment, folder / NAME, ranks, campaign.restarts)
    elif run.suite.command:
        words = _users(campaign, run, folder, proxied=variant.launch is Launch.PROXY)
    else:
        restarts = str(campaign.restarts) if variant.launch is Launch.TORCHRUN else "0"
        words = _torchrun(ranks, restarts, folder)
    if variant.launch is Launch.PROXY:
        words = _proxied(campaign, run, variant, faults, folder, calls, words)
    if variant.launch is not Launch.SUPERVISOR or run.suite.command:
        return lambda attempt: (words, ranks)

    def of_attempt(attempt: int) -> tuple[Sequence[str], int]:
        now = ranks_now(faults, folder, ranks)
        return _torchrun(now, "0", folder), now

    return of_attempt


def ranks_now(faults: Sequence[Fault], folder: Path, ranks: int) -> int:
    """As many as are there, by the faults that have happened."""
    for number, fault in enumerate(faults):
        if fired_marker(folder, number).exists():
            ranks -= fault.native is Native.LEAVE
            ranks += fault.native is Native.JOIN
    return ranks


def _torchrun(ranks: int, restarts: str, folder: Path) -> list[str]:
    words = [*installed("torchrun"), "--standalone", "--nproc-per-node", str(ranks)]
    return [*words, "--max-restarts", restarts, str(Path(training.__file__)), str(folder / NAME)]


def _proxied(
    campaign: Campaign,
    run: Planned,
    variant: Variant,
    faults: Sequence[Fault],
    folder: Path,
    calls: int,
    words: Sequence[str],
) -> list[str]:
    found = [*installed("proxyrun"), "--report", str(folder / REPORT), "--devices", f"cpu:{campaign.ranks}"]
    every = campaign.every(run.suite)
    found += [option.format(folder=folder, every=every) for option in variant.options]
    for fault in faults:
        found += ["--drill", str(fault.drill(calls))]
    return [*found, *words]


def _users(campaign: Campaign, run: Planned, folder: Path, *, proxied: bool) -> list[str]:
    """The user's own, filled in."""
    filled = run.suite.command.format(
        steps=campaign.steps,
        losses=shlex.quote(str(folder / LOSSES)),
        ranks=campaign.ranks,
        seed=run.seed,
        device="cuda" if proxied else "cpu",
    )
    words = shlex.split(filled)
    own = {"python": [sys.executable], "torchrun": installed("torchrun")}
    return [*own.get(words[0], [words[0]]), *words[1:]]
