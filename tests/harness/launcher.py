"""A Python that starts in milliseconds: it asks a zygote for a fork, or becomes the real Python.

`zygotes.install` makes an executable that runs this beside the real Python of the virtual environment. Tests
start what they test by it. An interpreter takes the name that it was started by for its own
(`sys.executable`), so whatever is started further on is started by it as well.

A zygote is asked where its fork is as good as a start: it knows the program, and has the same limits,
variables that libraries read as they are loaded, and namespaces but for those that a fork can enter.
Anything else becomes the real Python, with the same pid. So does everything where UNDERSTUDY_TEST_ZYGOTES is
not set or UNDERSTUDY_TEST_COLD is, and a command whose first word is --cold.

This process stands for the fork: it passes signals on, and ends as the fork ends. If it is killed, so is the
fork.

Thousands of these start in a run of the suite, so this imports nothing that is written in Python: `signal`
and `socket` alone take as long as all the rest.
"""

import _signal as signal  # type: ignore[import-not-found]
import _socket as socket
import marshal
import os
import resource
import sys

PYTHON = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "python")
OURS = ("proxyd", "proxyrun", "recoveryctl")
LOADED = ("LD_", "MALLOC_", "GLIBC_", "ASAN_", "TSAN_", "LC_", "GRPC_", "PYTHON")
LOADED_WITH_TORCH = (
    *LOADED,
    "OMP_", "GOMP_", "KMP_", "MKL_", "TORCH", "PYTORCH_", "ATEN_", "CUDA_", "CUBLAS_", "NCCL_", "GLOO_",
)  # fmt: skip
"""How variables begin that are read as a library is loaded, which in a zygote has been done."""
LOADED_BY_NAME = ("LANG", "UNDERSTUDY_SHARED_MEMORY")
READ_LATER = {
    "PYTHONPATH", "PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES", "GRPC_VERBOSITY", "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
}  # fmt: skip
LIMITS = [value for name, value in sorted(vars(resource).items()) if name.startswith("RLIMIT_")]
NAMESPACES = ("cgroup", "ipc", "pid", "user")
ENTERED = ("net", "uts", "mnt")
"""Namespaces that a fork of root's enters, of hosts that tests make; behind the last, folders are others."""
IMPORT_TORCH = ("torch", "training_script", "scenario")
PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
    signal.SIGQUIT,
)
MOST_FILES = 200
ZYGOTE_DIED = 70


def loaded_early(kind):
    """Those that a fork could not make up for."""
    early = LOADED if kind == "control" else LOADED_WITH_TORCH
    later = READ_LATER | ({"LD_LIBRARY_PATH"} if beside_simulated_gpus(kind) else set())
    return {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(early) or name in LOADED_BY_NAME)
        and name not in later
        and not name.startswith("TORCHELASTIC_")
    }


def beside_simulated_gpus(kind):
    """Whether it is a script where GPUs are simulated (simulated_device.py): those are for our processes."""
    return kind in ("worker", "native") and os.environ.get("UNDERSTUDY_TEST_DRIVER") == "simulated-cuda"


def surroundings(kind):
    """What a fork of a zygote has from it, and cannot change."""
    return {
        "namespaces": [
            os.readlink(f"/proc/self/ns/{name}")
            for name in (*NAMESPACES, *(() if os.geteuid() == 0 else ENTERED))
        ],
        "ids": [os.getuid(), os.geteuid(), os.getgid(), sorted(os.getgroups())],
        "cgroup": open("/proc/self/cgroup").read(),
        "variables": loaded_early(kind),
        "root": os.readlink("/proc/self/root"),
        "cores": sorted(os.sched_getaffinity(0)),
    }


def limits():
    return {number: resource.getrlimit(number) for number in LIMITS}


def kind_of(words):
    """Which zygote can run a command line without its first word; None: the real Python is to."""
    rest = list(words)
    while rest and rest[0] in ("-u", "-P"):
        rest.pop(0)
    below = bool(os.environ.get("UNDERSTUDY_JOB"))
    with_torch = "worker" if below else "native"
    if os.environ.get("UNDERSTUDY_RELAYS"):  # its process tree is the subject
        return None
    if rest[:1] == ["-m"] and len(rest) > 1:
        if rest[1].removeprefix("understudy.recovery.") in OURS:
            return None if below and "-P" not in words else "control"
        if rest[1] == "understudy.proxy_server.spawner":
            return "server"
        return with_torch if rest[1] == "torch.distributed.run" else None
    if not rest or rest[0].startswith("-"):
        return None
    name = os.path.basename(rest[0])
    if name == "conversation.py" and "-P" in words:
        return "control"
    if os.path.dirname(os.path.abspath(rest[0])) == os.path.dirname(PYTHON):
        if name == "torchrun":
            return with_torch
        return "control" if name in OURS and not below else None
    try:
        with open(rest[0], encoding="utf-8") as file:
            source = file.read()
    except (OSError, UnicodeDecodeError):
        return None
    folder = os.path.dirname(os.path.abspath(rest[0]))
    if os.path.exists(os.path.join(folder, "torch")) or not imports_torch(source):
        return None
    return with_torch


def imports_torch(source):
    for line in source.splitlines():
        words = line.replace(".", " ").replace(",", " ").split(None, 2)
        if words[:1] in (["import"], ["from"]) and words[1:2] and words[1] in IMPORT_TORCH:
            return True
    return False


def paths_are_plain(kind):
    """Whether PYTHONPATH arranges nothing but where to look."""
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    known = ("proxy_client/boot", *(("/simulated_cuda_site",) if beside_simulated_gpus(kind) else ()))
    others = [entry for entry in entries if not entry.endswith(known)]
    names = ("sitecustomize.py", "usercustomize.py", "torch", "understudy", "numpy")
    return not any(os.path.exists(os.path.join(entry, name)) for entry in others for name in names)


def become_python(words):
    # The name that it is started by is what it will take for its own.
    os.execv(PYTHON, [os.path.abspath(sys.argv[0]), *words])


def open_files():
    found = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    return [number for number in found if os.path.exists(f"/proc/self/fd/{number}") and is_inherited(number)]


def is_inherited(number):
    try:
        return number < 3 or os.get_inheritable(number)
    except OSError:  # what listed the folder
        return False


def ask(place, words):
    """What a zygote tells of the fork, a number a line, and the first, the fork's pid."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(place)
    files = open_files()
    entered = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in ENTERED]
    request = {
        "words": [os.path.abspath(sys.argv[0]), *words],
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "umask": os.umask(0),
        "limits": limits(),
        "ignored": [number for number in range(1, 32) if signal.getsignal(number) is signal.SIG_IGN],
        "files": files,
        "entered": len(entered),
        "python": PYTHON,
    }
    message = marshal.dumps(request)
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # from now on they are for the fork
    numbers = b"".join(number.to_bytes(4, sys.byteorder) for number in [*entered, *files][:MOST_FILES])
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)
    connection.sendmsg([len(message).to_bytes(4, "little")], [rights])
    for number in entered:
        os.close(number)
    connection.sendall(message)
    told = open(connection.detach(), "rb")  # noqa: SIM115 - as long as the fork lives
    return told, read_number(told)


def read_number(told):
    line = told.readline()
    if not line.endswith(b"\n"):
        sys.stderr.write("understudy tests: the zygote died that was to run this, or had forked it\n")
        os._exit(ZYGOTE_DIED)
    return int(line)


def stand_for(told, pid):
    """Until the fork has ended; then end likewise.  The name of this process says which one that is."""
    with open("/proc/self/comm", "w") as name:
        name.write(f"fork-{pid}")

    def pass_on(number, _):
        try:  # noqa: SIM105 - contextlib is written in Python
            os.kill(pid, number)
        except ProcessLookupError:
            pass

    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    for number in set(open_files()) - {2}:  # a pipe that the fork closes is to end then
        os.close(number)
    status = os.waitstatus_to_exitcode(read_number(told))
    if status >= 0:
        os._exit(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -status)
    signal.pause()


def main():
    words = sys.argv[1:]
    zygotes = os.environ.get("UNDERSTUDY_TEST_ZYGOTES", "")
    if words[:1] == ["--cold"]:
        become_python(words[1:])
    kind = kind_of(words) if zygotes and not os.environ.get("UNDERSTUDY_TEST_COLD") else None
    if kind is None or not paths_are_plain(kind):
        become_python(words)
        return
    try:
        with open(os.path.join(zygotes, f"{kind}.surroundings"), "rb") as file:
            if marshal.load(file) != surroundings(kind):
                become_python(words)
    except OSError:
        become_python(words)
    try:
        told, pid = ask(os.path.join(zygotes, kind), words)
    except OSError as problem:
        sys.exit(f"understudy tests: the zygote {kind!r} does not answer: {problem}")
    stand_for(told, pid)
