"""The options of proxyd; those in `OfRuns` proxyrun takes, too, for the proxyd that it starts for one run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from understudy.recovery.config.command_line import command_of, option
from understudy.recovery.snapshots.settings import Writing

DEVICES = "Devices"
RECOVERY = "Recovery"
STORAGE = "Snapshots on storage"
HOSTS = "Several hosts"
WATCHING = "Logs and metrics"
INTERNAL = "For proxyrun"
OF_PERSIST = (
    "persist_every", "persist_overhead", "persist_slots", "persist_only", "persist_log", "persist_threads",
    "persist_chunk", "persist_memory", "cpu_image_every", "keep_runs", "mirror", "keep_last", "keep_every",
)  # fmt: skip
"""Options that say something of --persist."""


@dataclass(frozen=True, kw_only=True)
class OfRuns:
    """What proxyd may be told, whoever starts it."""

    spares: Annotated[
        int, option("--spares", "Keep so many warm device servers beside one per device.", DEVICES, "N")
    ] = 1
    snapshot_overhead: Annotated[
        str,
        option(
            "--snapshot-overhead",
            "Share of the time that snapshots in memory may take; 0 switches them off.",
            RECOVERY, "SHARE",
        ),
    ] = "1%"  # fmt: skip
    collectives: Annotated[
        Literal["pytorch", "own"],
        option(
            "--collectives",
            "Whose calls of NCCL ranks on GPUs have: those of PyTorch's ProcessGroupNCCL, or our own, which "
            "have never run on a GPU yet. Ranks on processors have Gloo.",
            DEVICES,
        ),
    ] = "pytorch"
    hang_timeout: Annotated[
        str,
        option(
            "--hang-timeout",
            "The longest that a record or a collective may take, whatever seems to go on.",
            RECOVERY, "SECONDS",
        ),
    ] = "300"  # fmt: skip
    validate_every: Annotated[
        int,
        option(
            "--validate-every",
            "Execute every N-th minibatch twice, to see that replay gives the same bits; a rank alone no "
            "more often than its snapshots for that take 1% of the time. 0: never.",
            RECOVERY, "N",
        ),
    ] = 1000  # fmt: skip
    adoption_grace: Annotated[
        str,
        option(
            "--adoption-grace",
            "How long a job whose worker waits or has ended outlives a proxyd that died.",
            RECOVERY, "SECONDS",
        ),
    ] = "600"  # fmt: skip
    log_dir: Annotated[
        str,
        option(
            "--log-dir",
            "Where logs and snapshots of the running jobs lie, if /dev/shm is too small for them: on a disk, "
            "which is slower.",
            RECOVERY, "DIRECTORY",
        ),
    ] = ""  # fmt: skip
    persist: Annotated[
        str,
        option(
            "--persist",
            "Copy snapshots there, so that they outlive this node's memory.",
            STORAGE,
            "DIRECTORY",
        ),
    ] = ""
    persist_every: Annotated[
        str,
        option(
            "--persist-every",
            "Between two of them: seconds at least, so many steps, as 10steps, or auto.",
            STORAGE, "TIME",
        ),
    ] = "30"  # fmt: skip
    persist_overhead: Annotated[
        str,
        option(
            "--persist-overhead",
            "Share of the time that --persist-every auto may cost [3%].",
            STORAGE, "SHARE",
        ),
    ] = ""  # fmt: skip
    persist_slots: Annotated[
        int,
        option(
            "--persist-slots",
            "Room for so many snapshots of each rank: one that is complete, the others under way.",
            STORAGE, "N",
        ),
    ] = 3  # fmt: skip
    persist_only: Annotated[
        bool,
        option(
            "--persist-only",
            "Once on storage, snapshots leave this node's memory, and the log is kept from there on.",
            STORAGE,
        ),
    ] = False  # fmt: skip
    persist_log: Annotated[
        bool,
        option(
            "--persist-log",
            "Store the log behind the newest snapshot, too: a power cut costs a minibatch.",
            STORAGE,
        ),
    ] = False  # fmt: skip
    keep_runs: Annotated[
        int,
        option(
            "--keep-runs",
            "Runs of a job whose snapshots stay under --persist, counting from its newest start.",
            STORAGE, "N",
        ),
    ] = 3  # fmt: skip
    mirror: Annotated[
        str,
        option(
            "--mirror",
            "Copy what --persist has completed there, too, in the background: s3://bucket/prefix, "
            "file:///mnt/nfs, …",
            STORAGE, "URL",
        ),
    ] = ""  # fmt: skip
    keep_last: Annotated[
        int | None,
        option("--keep-last", "So many snapshots of a job stay at --mirror [3].", STORAGE, "N"),
    ] = None
    keep_every: Annotated[
        int | None,
        option(
            "--keep-every",
            "Beside them the first snapshot of every so many steps stays there; 0: none [0].",
            STORAGE, "STEPS",
        ),
    ] = None  # fmt: skip

    def told(self) -> dict[str, str]:
        """The options that differ from their defaults, by flag, as they are written; "" of a switch."""
        told = {}
        for field in fields(OfRuns):
            value = getattr(self, field.name)
            if value != field.default:
                told[f"--{field.name.replace('_', '-')}"] = "" if value is True else str(value)
        return told


AUTO = "auto: 8GiB, and for a GPU its share of /dev/shm if that is more"


@dataclass(frozen=True, kw_only=True)
class ProxydOptions(OfRuns):
    """All that proxyd may be told."""

    devices: Annotated[str, option("--devices", "The devices to own: cpu:2, cuda:8.", DEVICES, "KIND:COUNT")]
    socket: Annotated[
        Path | None,
        option("--socket", "Where to listen [$UNDERSTUDY_SOCKET, or in $XDG_RUNTIME_DIR].", DEVICES, "PATH"),
    ] = None
    log_cap: Annotated[
        str, option("--log-cap", "The most that the replay log of a rank may take.", RECOVERY, "SIZE")
    ] = "4GiB"
    shadow_limit: Annotated[
        str,
        option("--shadow-limit", f"The most that saved state of a rank may take; {AUTO}.", RECOVERY, "SIZE"),
    ] = "auto"
    snapshot_limit: Annotated[
        str,
        option("--snapshot-limit", f"The most that snapshots of a rank may take; {AUTO}.", RECOVERY, "SIZE"),
    ] = "auto"
    optimizer_preimages: Annotated[
        Literal["on", "off"],
        option(
            "--optimizer-preimages",
            "Keep what an optimizer step overwrites, so that it can be undone. A rank whose device has no "
            "memory for that goes on without.",
            RECOVERY,
        ),
    ] = "on"
    exact: Annotated[
        Literal["on", "strict", "off"],
        option(
            "--exact",
            "On GPUs: take kernels that give the same bits each time, as torch.use_deterministic_algorithms; "
            "strict: NCCL also reduces by rings and its simple protocol alone, so that a rank that moves to "
            "another GPU computes the same where rings have the same order there; "
            "off: a recovery restores the state of a correct run, not its bits.",
            RECOVERY,
        ),
    ] = "on"
    persist_threads: Annotated[
        int, option("--persist-threads", "Threads that write each rank's part of a snapshot.", STORAGE, "P")
    ] = Writing.threads
    persist_chunk: Annotated[
        str, option("--persist-chunk", "The unit of writes and checksums.", STORAGE, "SIZE")
    ] = "4MiB"
    persist_memory: Annotated[
        str, option("--persist-memory", "Memory of a rank for chunks under way.", STORAGE, "SIZE")
    ] = "64MiB"
    cpu_image_every: Annotated[
        str,
        option(
            "--cpu-image-every",
            "Take images of the workers on other hosts of a job that is led from here, so far apart, and "
            "keep them below --persist, so that a rank comes back if its host is lost.",
            STORAGE, "SECONDS",
        ),
    ] = ""  # fmt: skip
    metrics: Annotated[
        str,
        option(
            "--metrics",
            "Serve metrics for Prometheus there, on this machine only unless a host is named.",
            WATCHING, "[HOST:]PORT",
        ),
    ] = ""  # fmt: skip
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], option("--log-level", "What is logged.", WATCHING)
    ] = "info"
    etcd: Annotated[
        str,
        option(
            "--etcd",
            "Where hosts know each other from: http://10.0.0.1:2379. Without it this host is by itself.",
            HOSTS, "URL[,URL]",
        ),
    ] = ""  # fmt: skip
    cluster: Annotated[str, option("--cluster", "Which cluster of those there [default].", HOSTS, "NAME")] = (
        ""
    )
    host_name: Annotated[
        str, option("--host-name", "Of this host in the cluster [this machine's].", HOSTS, "NAME")
    ] = ""
    listen: Annotated[
        str,
        option(
            "--listen", "Where proxyds of other hosts may ask this one, with certificates.", HOSTS, "IP:PORT"
        ),
    ] = ""
    certs: Annotated[
        Path | None,
        option(
            "--certs",
            "ca.pem, and certificate and key of this host: `recoveryctl certs` makes them.",
            HOSTS, "DIRECTORY",
        ),
    ] = None  # fmt: skip
    listen_anywhere: Annotated[
        bool,
        option(
            "--listen-anywhere",
            "Let --listen and --data-address name what the whole world may reach.",
            HOSTS,
        ),
    ] = False  # fmt: skip
    data_address: Annotated[
        str,
        option(
            "--data-address",
            "Address of this host for what device servers of several hosts send each other [that of "
            "--listen].",
            HOSTS, "IP",
        ),
    ] = ""  # fmt: skip
    shared_directory: Annotated[
        Path | None,
        option(
            "--shared-directory",
            "On storage that all hosts mount: state that a device server cannot read of another host's goes "
            "that way, encrypted.",
            HOSTS, "DIRECTORY",
        ),
    ] = None  # fmt: skip
    ready_fd: Annotated[
        int, option("--ready-fd", "Where to tell that it is ready.", INTERNAL, "FD", hidden=True)
    ] = -1
    parent_pid: Annotated[
        int, option("--parent-pid", "Stop when this process ends.", INTERNAL, "PID", hidden=True)
    ] = 0


def proxyd_command() -> object:
    """proxyd's command line."""
    return command_of(
        ProxydOptions, "Own this node's devices and keep training jobs alive on them.", "proxyd"
    )
