"""What every test shares: a seed, printed with a failure and settable to repeat it."""

import os
import random
import shutil
import signal
import tempfile
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path

import needs
import pytest
import simulated_device
from ending import WHOLE_END, WHOLE_END_EVERY
from training_run import TooFewGpus, driver
from zygotes import COLD, Zygotes, obstacle

if simulated_device.wanted():
    os.environ.update(simulated_device.environment())
    simulated_device.load()

pytest_plugins = ["skipped", "durations", "quick", "drawing"]  # in the order in which they import each other

VARIABLE = "UNDERSTUDY_SHARED_MEMORY"
HISTORY = "UNDERSTUDY_HISTORY"
COLD_EVERY = 50
ZYGOTES = pytest.StashKey[Zygotes]()
VARIABLES = pytest.StashKey[dict[str, str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Shared memory of our own: a test process beside us looks for what was left there, too.

    A history of our own as well: that of whoever runs the tests is about trainings.

    And zygotes of our own, where tests run: not in the process that hands them out.
    """
    os.environ[VARIABLE] = tempfile.mkdtemp(prefix="understudy-test-", dir="/dev/shm")
    os.environ[HISTORY] = tempfile.mkdtemp(prefix="understudy-test-history-") + "/history.jsonl"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as what a shell has put into the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # else all that tests start would ignore it
    os.environ.update(needs.environment())
    os.environ.pop("PYTHONUNBUFFERED", None)  # output comes in the same pieces wherever tests run
    os.environ["OMP_NUM_THREADS"] = "1"  # as on a machine with a core for each process; zygotes have it too
    runs_tests = not config.getoption("numprocesses", None) and not config.option.collectonly
    if runs_tests and not obstacle():
        config.stash[ZYGOTES] = Zygotes()
    config.stash[VARIABLES] = dict(os.environ)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """No file finds what another one has left in the variables.

    Libraries set some as they are imported (scikit-learn two of OpenMP's), and what is started behind that
    starts in other surroundings than a zygote has.
    """
    done = yield
    if nextitem is None or nextitem.path != item.path:
        before = item.config.stash[VARIABLES]
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
    return done


LONG_S = 1800
"""For a test that does in full what another one samples; the others have what pyproject.toml says."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """A long test that does not say how long it may take."""
    if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
        item.add_marker(pytest.mark.timeout(LONG_S))


def pytest_report_header() -> list[str]:
    """What makes the tests slower here."""
    return [f"each process is started anew: {why}"] if (why := obstacle()) else []


def pytest_unconfigure(config: pytest.Config) -> None:
    """Nothing stays."""
    if ZYGOTES in config.stash:
        config.stash[ZYGOTES].stop()
    shutil.rmtree(os.environ.pop(VARIABLE), ignore_errors=True)
    shutil.rmtree(os.path.dirname(os.environ.pop(HISTORY)), ignore_errors=True)


@pytest.fixture(autouse=True)
def _cold_start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of tests, always the same, starts each process anew, as those do that are marked `cold`.

    A fork of a zygote could hide something. `make test-long` starts all of them so. In another sample forks
    take their interpreters down at their end, which the others leave to the kernel (ending.py).
    """
    number = zlib.crc32(request.node.nodeid.encode())
    if number % WHOLE_END_EVERY == 1:
        monkeypatch.setenv(WHOLE_END, "1")
    if number % COLD_EVERY == 0 or request.node.get_closest_marker("cold"):
        monkeypatch.setenv(COLD, "1")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Ranks that share a GPU are no failure of ours."""
    try:
        return (yield)
    except TooFewGpus as problem:
        pytest.skip(str(problem))


@pytest.fixture(autouse=True)
def _of_this_driver(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("cpu_driver") and driver() != "cpu":
        pytest.skip("the cpu driver")


@pytest.fixture
def seed() -> int:
    """A seed for this test: `UNDERSTUDY_TEST_SEED`, or a new one. Captured output shows it on failure."""
    chosen = int(os.environ.get("UNDERSTUDY_TEST_SEED") or random.SystemRandom().randrange(2**31))
    print(f"repeat with UNDERSTUDY_TEST_SEED={chosen}")
    return chosen


@pytest.fixture
def simulated_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that this test starts finds them, also where the suite runs on something else."""
    simulated_device.put_in_place(monkeypatch)


@pytest.fixture(params=["pytorch", "own"])
def collectives(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """On simulated GPUs the same is asked of what stands for ProcessGroupNCCL and of our own calls of NCCL.

    Those alone begin communicators of the library.
    """
    told = folder / "told"
    monkeypatch.setenv("SIMULATED_NCCL_TOLD", str(told))
    yield request.param
    assert told.exists() == (request.param == "own")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Private, with a path short enough for sockets, which that of tmp_path may not be."""
    with tempfile.TemporaryDirectory(prefix="understudy-test-", dir="/tmp") as made:
        yield Path(made)
