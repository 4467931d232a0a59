"""Checkpoints just in time: when a rank fails, the others save, and the job goes on (paper 001 §3).

    import understudy.jit as jit

    jit.init(save_checkpoint=save, directory="ckpt")  # save(path): this rank's state, no collectives
    if (path := jit.get_checkpoint_path()) is not None:
        load(path)
        jit.restore_generators()
    for step in range(jit.completed_steps(), steps):
        ...; optimizer.step(); scheduler.step()
        jit.boundary()

Under `torchrun --max-restarts` nothing else is needed: `examples/jit_checkpoint.py` is a complete script.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .identity import Identity, JitError

if TYPE_CHECKING:
    from .session import Session
    from .storage import Choice

__all__ = [
    "Identity",
    "JitError",
    "boundary",
    "close",
    "completed_steps",
    "get_checkpoint_path",
    "go_on_from",
    "init",
    "jit_get_checkpoint_path",
    "keep_generators",
    "load_local_state",
    "local_state",
    "restore_generators",
    "saved",
    "wait_for_shards",
]

_session: Session | None = None
_forks_are_seen = False


def init(
    save_checkpoint: Callable[[Path], None],
    directory: str | os.PathLike[str] = "ckpt",
    replica_group: Any = None,
    shard: str = "0",
    job: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    grace: float = 25.0,
    minimum_stall: float = 30.0,
) -> None:
    """This rank saves when the job fails. Call it in the main thread, behind `init_process_group`.

    All ranks call it, and wait for one another. `save_checkpoint(path)` writes this rank's parameters,
    optimizer and scheduler to `path`, as a file or a folder; it calls no collective (see `local_state`), and
    may run in another thread. What the training counts belongs to it as `completed_steps()`, not as the
    script's own variable, which may be a step ahead. `replica_group`: the process group of those that have
    the same state, all ranks by default. `shard`: which part of the state that is; replicas give the same
    name, and no one else (for FSDP2 the coordinate in the mesh's dimension that shards). A job with several
    shards calls `boundary()`: its ranks wait for one another before parameters change, so that a fault cannot
    leave shards at different steps. `also`: directories of `recoveryctl snapshots export` that compete by
    step. `grace`: seconds in which a save should end; launchers kill 30 s behind SIGTERM. `minimum_stall`:
    seconds for which a collective may stand still at least, or a thread keep the GIL in C. While a rank is at
    work alone (evaluation, its own checkpoints), the others hear that, and wait.

    What saves: an exception that ends the script, SIGTERM, a collective that no longer moves, a thread that
    hangs in C and has the GIL (it is made to give it up, and the process ends behind its save). What does
    not:
    KeyboardInterrupt, SystemExit, an exception that the script catches, a fault inside `optimizer.step()`,
    any fault before the first step is completed.

    Collectives of NCCL are seen, and states on GPUs saved past one that hangs, where the script is started
    with `LD_PRELOAD="$(python -m understudy.jit preload)"` (paper §3.1-3.2). It was never run on a GPU.

    `torchrun` of PyTorch 2.13 gives a restarted job the store of the attempt before, whose stale addresses
    make Gloo fail or hang; start it with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` in the environment.

    Warns of a state that no other rank has (ZeRO, FSDP without replicas), and of different parts with one
    name, as far as optimizers exist by now; the first step raises JitError for such names. Raises JitError
    for a directory that cannot be used, and if it is called twice without `close`.
    """
    from .replicas import warn_without_replica
    from .session import Session
    from .storage import ShardDirectory

    global _session
    if _session is not None and _session.closing:
        close()
    if _session is not None:
        raise JitError("jit.init was called before; call jit.close() first, or leave this call out.")
    if not callable(save_checkpoint):
        raise JitError("save_checkpoint must be a function of the path to write to.")
    if not (grace > 0 and minimum_stall > 0):
        raise JitError(f"grace is {grace} s and minimum_stall {minimum_stall} s; both must be above 0.")
    if threading.current_thread() is not threading.main_thread():
        raise JitError("jit.init must be called in the main thread, the only one that can handle signals.")
    told = warn_without_replica(replica_group)
    store = ShardDirectory(Path(directory), Identity.of(shard=shard, job=job))
    session = Session(save_checkpoint, store, tuple(also), grace, minimum_stall)
    session.start(told)
    _session = session
    _see_forks()


def get_checkpoint_path() -> Path | None:
    """What to load: this rank's payload of the newest step that all shards have; None to begin anew.

    Rank 0 chooses, and all ranks of the process group take the same step; all must call it. The count of
    steps goes on there. Raises JitError.
    """
    return _open().choose()


jit_get_checkpoint_path = get_checkpoint_path
"""The paper's name."""


def restore_generators() -> bool:
    """Give this rank its own generators, as of the step that was chosen; call it behind loading.

    Python's, NumPy's (if it is loaded by now) and PyTorch's for the CPU and CUDA's devices. They are written
    down at the end of each step, in `DIR/slots`, and outlive a rank that is killed. False, with a sentence on
    stderr, if they are not there: the host was lost, or the step is one of a periodic checkpoint that is long
    past.
    """
    return _open().restore_generators()


def boundary() -> None:
    """A training step ends here: everything that it changes has changed.

    Call it at the end of each step, or never. Without it a step ends with the optimizer's, and a fault
    between that and the next forward pass saves nothing. A script with several optimizers, with gradient
    scaling that leaves steps out, or with parameters that are changed without an optimizer, must call it.
    """
    _open().boundary.declare()


def go_on_from(step: int) -> None:
    """The script has loaded a checkpoint of its own: the count of steps goes on there.

    Not for that of `get_checkpoint_path`, which counts by itself.
    """
    if step != completed_steps():
        _open().boundary.go_on_from(step)


def keep_generators() -> None:
    """What was drawn since the last boundary belongs to the completed step: call it behind an evaluation.

    A job that resumes at this step does not repeat the evaluation; its generators go on from here.
    """
    _open().boundary.keep_generators()


def completed_steps() -> int:
    """Steps that the state has in it which a save would write now; those before a restart are counted too."""
    return _open().boundary.step


def local_state(**parts: Any) -> dict[str, Any]:
    """`state_dict()` of each part, as this rank has it: for `save_checkpoint` of a job that shards its state.

    A DTensor (FSDP2, tensor parallelism) becomes its local tensor, with a record of which part of the whole
    that is. Calls no collective; replicas answer with the same bytes; `torch.load(weights_only=True)` reads
    it. Raises JitError for FSDP1, whose state_dict calls collectives.
    """
    from .sharded_state import local_state as local

    return local(parts)


def load_local_state(state: Mapping[str, Any], /, **parts: Any) -> None:
    """What `local_state` has answered, into the same parts of a job that shards them alike.

    Raises JitError, in one sentence, where mesh or sharding are others. The number of replicas may differ.
    """
    from .sharded_state import load_local_state as load

    load(state, parts)


def saved(path: str | os.PathLike[str], step: int) -> None:
    """The script has written a checkpoint of its own, behind this step: it competes by step. Raises JitError.

    Generators belong into it: those in `DIR/slots` are of the last few steps alone.
    """
    _open().saved(path, step)


def wait_for_shards(directory: str | os.PathLike[str], timeout: float) -> Choice:
    """For launchers: wait until a step has all shards of the newest attempt, so that the job may be ended.

    `timeout` in seconds. Raises JitError when it is over, which names the shards that lack.
    """
    from .storage import wait_for_shards as wait

    return wait(Path(directory), timeout)


def close() -> None:
    """Training is over, or goes on without this: hooks and threads are gone behind it. May be called again.

    Called while an exception is on its way (`finally: jit.close()`), it leaves that to save.
    """
    global _session
    if _session is not None and _session.close():
        _session = None


def _open() -> Session:
    if _session is None:
        raise JitError("jit.init has not been called in this process, or jit.close has.")
    return _session


def _see_forks() -> None:
    global _forks_are_seen
    if not _forks_are_seen:
        _forks_are_seen = True
        os.register_at_fork(after_in_child=_forget_in_child)


def _forget_in_child() -> None:
    """Workers of data loaders and the like are no ranks."""
    global _session
    if (session := _session) is not None:
        _session = None
        session.forget_in_child()
