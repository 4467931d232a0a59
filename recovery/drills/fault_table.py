"""Every fault that can be injected, by number: what it does, who notices, and what happens then.

The numbers are DrillKind of the log (replay/csrc/log/log_format.h).  Faults of a device server strike at an
exact record; those that only proxyd can cause (`by_proxyd`) strike while the server waits at that record.
"""

from __future__ import annotations

from dataclasses import dataclass

from understudy.recovery.planning.facts import FaultKind


@dataclass(frozen=True)
class InjectedFault:
    """One row of the table.  `noticed_as`: what the coordinator is told; None where no recovery is due."""

    number: int
    name: str
    does: str
    noticed_by: str
    then: str
    noticed_as: FaultKind | None
    by_proxyd: bool = False


BY_WORD = "the word it held in its log, or pidfd"

FAULTS = (
    InjectedFault(
        1, "kill-server", "the device server is killed (SIGKILL)", BY_WORD,
        "restart-copy-replay; inside an optimizer step without pre-images roll-forward, if the others can "
        "finish that step and hold the same state, else restore-snapshot-replay", FaultKind.SERVER_DIED,
    ),
    InjectedFault(
        2, "stop-server", "the device server is stopped (SIGSTOP)",
        "the watch: stopped by a signal while records wait",
        "it is ended, then restart-copy-replay", FaultKind.SERVER_STOPPED,
    ),
    InjectedFault(
        3, "call-error", "one call fails once", "the executor's report",
        "rewind-in-place; the second time restart-copy-replay, the third time the error is the program's",
        FaultKind.CALL_FAILED,
    ),
    InjectedFault(
        4, "sticky-error", "all calls fail until the device server is restarted", "the executor's report",
        "rewind-in-place fails at once, then restart-copy-replay", FaultKind.CALL_FAILED,
    ),
    InjectedFault(
        5, "driver-suspect", "a call fails, the driver is not to be trusted any more, its memory can be read",
        "the executor's report", "stash-restart-restore", FaultKind.DRIVER_SUSPECT,
    ),
    InjectedFault(
        6, "collective-hang", "the next collective that the device server waits for never ends",
        "the watch: every member has begun it, and nobody moves", "rewind-in-place with new communicators",
        FaultKind.COLLECTIVE_HUNG,
    ),
    InjectedFault(
        7, "network-partition", "the device server's connections break, and none can be made for 1.5 s",
        "an error from Gloo / NCCL", "rewind-in-place, tried again until the peers can be reached",
        FaultKind.COLLECTIVE_FAILED,
    ),
    InjectedFault(
        8, "lasting-partition", "the device server's connections break, and none can ever be made again",
        "an error from Gloo / NCCL", "give-up, after rewinding in place did not help for about a minute",
        FaultKind.COLLECTIVE_FAILED,
    ),
    InjectedFault(
        9, "device-gone", "the device does not answer any more, and its server ends",
        "pidfd, and what the server left in the log", "restart-copy-replay on a device that no session holds",
        FaultKind.DEVICE_GONE,
    ),
    InjectedFault(
        10, "bit-flip", "one bit of the oldest state buffer (a parameter, as a rule) changes",
        "digests of replicas, compared before a commit is relied on",
        "rewind-in-place to the last commit that agreed, and where a rank's own digests tell that its memory "
        "was spoilt, restart-copy-replay", FaultKind.SILENT_CORRUPTION,
    ),
    InjectedFault(
        11, "slow-rank", "for one minibatch every record takes 2 ms longer", "it is no fault",
        "the other ranks wait", None,
    ),
    InjectedFault(
        12, "kill-spare", "a warm spare is killed", "pidfd", "it is replaced", None, by_proxyd=True,
    ),
    InjectedFault(
        13, "kill-all-servers", "the device servers of all ranks of the job are killed", BY_WORD,
        "restore-snapshot-replay, or restart-copy-replay while the log is whole; restore-stored-replay where "
        "a snapshot is on storage only; give-up without snapshots",
        FaultKind.SERVER_DIED, by_proxyd=True,
    ),
    InjectedFault(
        14, "kill-proxyd", "proxyd is killed", "whoever started it (proxyrun, for its own)",
        "device servers go on; a proxyd started again adopts them and what has happened meanwhile", None,
        by_proxyd=True,
    ),
    InjectedFault(
        15, "kill-worker", "the worker process is killed", "pidfd",
        "the session ends; torchrun decides what follows", None, by_proxyd=True,
    ),
)  # fmt: skip

BY_NAME = {fault.name: fault for fault in FAULTS}
BY_NUMBER = {fault.number: fault for fault in FAULTS}


def as_markdown() -> str:
    """The table for docs/faults.md."""
    lines = [
        "| no. | fault | what happens | noticed by | then |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {fault.number} | `{fault.name}` | {fault.does} | {fault.noticed_by} | {fault.then} |"
        for fault in FAULTS
    ]
    return "\n".join(lines) + "\n"
