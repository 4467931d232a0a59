"""What a launcher sees of a worker below a relay: what it would see of the worker itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import proxied
import pytest
from migratable_run import MigratableRun, skip_without_namespaces
from proxied import left_behind, until

from understudy.proxy_client.relayed import wanted
from understudy.recovery.migration.process.images import MANIFEST, Damaged, seal, verify
from understudy.recovery.migration.process.moving import Tool, first_error

pytestmark = pytest.mark.drawn(8)

STORES = proxied.WORKLOADS / "migration" / "stores.py"


# ------------------------------------------------------------------ who gets a relay
@pytest.mark.parametrize(
    ("command", "variables", "is_worker"),
    [
        ("python train.py", {}, True),
        ("python -u -c pass", {}, True),
        ("python /venv/bin/torchrun --standalone train.py", {}, False),
        ("python -m torch.distributed.run train.py", {}, False),
        ("python -m accelerate.commands.launch train.py", {}, False),
        ("python -m mypackage.train", {}, True),
        ("python /venv/bin/torchrun train.py", {"RANK": "0"}, True),
        ("python -u train.py", {"LOCAL_RANK": "1"}, True),
        ("python -c spawn_main() --multiprocessing-fork", {"RANK": "1"}, False),
        ("python train.py", {"RANK": "1", "UNDERSTUDY_RELAY": "/r/s"}, False),
        ("python train.py", {"UNDERSTUDY_RELAYS": ""}, False),
    ],
)
def test_workers_get_a_relay_and_launchers_do_not(
    command: str, variables: dict[str, str], is_worker: bool
) -> None:
    assert wanted(command.split(), {"UNDERSTUDY_RELAYS": "/r"} | variables) is is_worker


# ------------------------------------------------------------------ images
def an_image(folder: Path) -> Path:
    image = folder / "pages-1.img"
    image.write_bytes(b"pages")
    assert seal(folder) == {"pages-1.img": 5}
    verify(folder)
    return image


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda image: image.write_bytes(b"pageS"), "not the content"),
        (lambda image: image.write_bytes(b"pages+"), "not the size"),
        (lambda image: image.unlink(), "missing"),
        (lambda image: (image.parent / "more.img").write_bytes(b""), "not in the manifest"),
        (lambda image: (image.parent / MANIFEST).write_text("[]"), "makes no sense"),
        (lambda image: (image.parent / MANIFEST).write_text('{"images": {"a": 7}}'), "makes no sense"),
        (lambda image: (image.parent / MANIFEST).write_text('{"images": {}}'), "not in the manifest"),
    ],
)
def test_images_that_changed_are_not_restored(damage: object, words: str, tmp_path: Path) -> None:
    image = an_image(tmp_path)
    damage(image)  # type: ignore[operator]
    with pytest.raises(Damaged, match=words):
        verify(tmp_path)


def test_the_first_error_of_crius_log_is_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "(0.1) Error (criu/util.c:1): rlimit: Can't setup RLIMIT_NOFILE\n"
        "(0.2) Error (criu/files.c:2): cannot dump this\n(0.3) Error (criu/cr-dump.c:3): Dumping FAILED.\n"
    )
    assert first_error(log) == "cannot dump this"
    assert first_error(tmp_path / "none") == ""


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "order", [{}, {"criu": "true", "images": "/tmp"}, {"criu": "/bin/true", "images": 7}, {"criu": ["x"]}]
)
def test_an_order_that_makes_no_sense_is_refused(order: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="is no "):
        Tool.of(order)


# ------------------------------------------------------------------ a relay at work
TAKE_SIGNALS = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "for number in (signal.SIGQUIT, signal.SIGHUP): signal.signal(number, signal.SIG_DFL)\n"
)
"""A shell ignores some for what it runs in the background, as these tests may be."""


def below_a_relay(folder: Path, code: str) -> subprocess.Popen[str]:
    """`code` under a relay, without proxyrun and proxyd."""
    skip_without_namespaces()
    relays = folder / "relays"
    relays.mkdir(mode=0o700)
    start = (
        TAKE_SIGNALS
        + "from understudy.recovery.migration.relay.relaying import main; import sys; main(sys.argv[1:])"
    )
    return subprocess.Popen(
        [sys.executable, "-P", "-c", start, sys.executable, "-c", code], cwd=folder,
        env={"UNDERSTUDY_RELAYS": str(relays), "PATH": "/usr/bin:/bin"}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_whether_namespaces_can_be_made_is_tried_without_a_fork_of_this_process() -> None:
    """In proxyd, gRPC's handlers of forks abort such a child, or it waits for ever."""
    code = (
        "import os; from understudy.recovery.migration.process.namespaces import trouble_making\n"
        "os.register_at_fork(before=lambda: os._exit(9))\n"
        "print(trouble_making() or 'none')"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and done.stdout


def test_output_environment_and_exit_status_pass_through(tmp_path: Path) -> None:
    code = (
        "import os, sys; print(os.getpid(), os.getsid(0), os.getcwd()); print('x' * 3000000)\n"
        "print('trouble', file=sys.stderr); print(os.environ['UNDERSTUDY_RELAY']); sys.exit(7)"
    )
    run = below_a_relay(tmp_path, code)
    output, errors = run.communicate(timeout=60)
    first, long, relay = output.splitlines()
    assert first == f"2 2 {tmp_path}"
    assert len(long) == 3_000_000
    assert Path(relay).parent.parent == tmp_path / "relays"
    assert (errors, run.returncode) == ("trouble\n", 7)
    assert list((tmp_path / "relays").iterdir()) == [], "it cleans up"


def test_a_worker_that_dies_of_a_signal_takes_its_relay_along(tmp_path: Path) -> None:
    run = below_a_relay(tmp_path, "import os; os.kill(os.getpid(), 11)")
    run.communicate(timeout=60)
    assert run.returncode == -signal.SIGSEGV


def test_a_command_that_cannot_be_started_ends_with_127(tmp_path: Path) -> None:
    skip_without_namespaces()
    (tmp_path / "relays").mkdir(mode=0o700)
    start = "from understudy.recovery.migration.relay.relaying import main; main(['/no/such/python'])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", start], env={"UNDERSTUDY_RELAYS": str(tmp_path / "relays")},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 127
    assert "cannot start /no/such/python: No such file or directory" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_signals_reach_the_worker(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import signal, sys\n"
        f"signal.signal({int(number)}, lambda *_: (print('got it'), sys.exit(5)))\n"
        "import time; open('ready', 'w').close()\n"
        "while True: time.sleep(0.05)"  # a signal just before signal.pause() would wait for another
    )
    run = below_a_relay(tmp_path, code)
    until((tmp_path / "ready").exists, "a worker")
    run.send_signal(number)
    assert run.communicate(timeout=60)[0] == "got it\n"
    assert run.returncode == 5


def test_a_relay_that_is_killed_leaves_no_worker(tmp_path: Path) -> None:
    code = "import time; open('ready', 'w').close(); time.sleep(1000)"
    run = below_a_relay(tmp_path, code)
    until((tmp_path / "ready").exists, "a worker")
    run.kill()
    run.communicate(timeout=60)  # ends only once the worker, too, has closed its output
    assert left_behind() == []


def test_groups_and_the_store_work_without_a_connection_in_any_worker(tmp_path: Path) -> None:
    skip_without_namespaces()
    with MigratableRun(tmp_path / "run", ranks=2) as run:
        run.start(proxied.torchrun(2, STORES))
        output, _ = run.finish()
    assert sorted(output.splitlines()) == ["rank 0 is content", "rank 1 is content"]
