"""The ways of running a training that a campaign compares, and what each of them promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from understudy.campaigns.planning.faults import Fault, Native


class Launch(Enum):
    """Who starts the ranks again."""

    SUPERVISOR = "the supervisor starts torchrun again (paper 002 §4.7)"
    TORCHRUN = "torchrun --max-restarts"
    PROXY = "proxyrun: nothing is started again"
    PEER = "its own launcher"


STORES = frozenset({Native.STORAGE_ERROR, Native.STORAGE_LATE})
SIZES = frozenset({Native.LEAVE, Native.JOIN})


@dataclass(frozen=True)
class Variant:
    """`keeps`: who keeps the state, in programs/keepers.py. `exact`: parameters are promised to the bit."""

    name: str
    launch: Launch
    keeps: str
    what: str
    exact: bool = True
    environment: str = ""
    """Of the peer it belongs to, below build/; empty: this project's own."""
    options: tuple[str, ...] = ()
    """Of proxyrun; {folder} and {every} are filled in."""

    def meets(self, fault: Fault) -> str:
        """Why such a fault cannot happen to it; empty if it can."""
        if self.launch is Launch.PROXY:
            if fault.drill(calls=1) is not None:
                return ""
            if fault.native in STORES:
                return "it writes no checkpoint from the script"
            return "a job keeps its number of ranks; a device that is lost needs another one"
        if fault.native is None:
            return f"{fault.kind} is a fault of a device server"
        if fault.native in STORES and self.keeps not in CHECKPOINTS:
            return "it writes no periodic checkpoint that its ranks wait for to be durable"
        if fault.native in SIZES and not (self.launch is Launch.SUPERVISOR and self.keeps in RESIZABLE):
            return "it is not started again with another number of ranks"
        return ""

    def keeps_bits(self, faults: list[Fault]) -> bool:
        """Whether parameters at the end are promised to be those of the undisturbed run."""
        return self.exact and not any(fault.native in SIZES for fault in faults)


CHECKPOINTS = frozenset({"blocking", "overlapped", "dcp-async"})
"""Keepers that write to storage while all is well."""
RESIZABLE = frozenset({"none", "blocking", "overlapped"})

VARIANTS: Mapping[str, Variant] = {
    one.name: one
    for one in (
        Variant("bare", Launch.SUPERVISOR, "none", "no checkpoints, no proxy: begins anew"),
        Variant("blocking", Launch.SUPERVISOR, "blocking", "StatePack, blocking (paper 002 §4.4)"),
        Variant("overlapped", Launch.SUPERVISOR, "overlapped", "StatePack, overlapped (paper 002 §4.4)"),
        Variant("dcp-async", Launch.SUPERVISOR, "dcp-async", "torch.distributed.checkpoint.async_save"),
        Variant("torchrun", Launch.TORCHRUN, "blocking", "torchrun --max-restarts, StatePack blocking"),
        Variant("jit", Launch.TORCHRUN, "jit", "understudy.jit: saved by the others at the fault"),
        Variant("transparent", Launch.PROXY, "none", "proxyrun, the script unchanged"),
        Variant(
            "transparent+persist", Launch.PROXY, "none", "proxyrun --persist",
            options=("--persist", "{folder}/persist", "--persist-every", "{every}steps"),
        ),
        Variant("torchft", Launch.PEER, "torchft",
                "torchft as in its example: groups heal from each other; one alone uses half a batch",
                exact=False, environment="torchft"),
        Variant("torchft-whole", Launch.PEER, "torchft-whole",
                "torchft with min_replicas of all groups: no step without the whole batch",
                exact=False, environment="torchft"),
        Variant("nvrx", Launch.PEER, "nvrx",
                "nvidia-resiliency-ext: ft_launcher, in-process restart, local checkpoints",
                environment="nvrx"),
    )
}  # fmt: skip
REFERENCE = "bare"
"""Whose undisturbed run is what every other one is compared with."""
