"""What protection moves from a GPU to its host in a step, and its waits, counted on the simulated device."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path

import pytest
import simulated_device
from training_run import Training

pytestmark = pytest.mark.drawn(6)


LOOK_S = 0.005
STEPS = 120
MOST = 0.005
"""Of the bytes that a step's commit digests, those that come to the host."""
OWN_WAITS = 1
"""Of both scripts, in a step: loss.item()."""
GPT = ["--width", "256", "--layers", "2", "--heads", "4", "--block-size", "32", "--batch-size", "2"]
CONVNET = ["--width", "96", "--batch-size", "8"]


class Watch:
    """Reads the counters of all device servers that write them into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._over = threading.Event()
        self.seen: dict[str, list[simulated_device.Counters]] = defaultdict(list)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            for name, counters in simulated_device.counters_in(self._folder).items():
                self.seen[name].append(counters)


@pytest.mark.parametrize(
    ("script", "words"), [("char_gpt.py", GPT), ("digits_convnet.py", CONVNET)], ids=["GPT", "convnet"]
)
def test_a_step_of_a_protected_training_brings_few_bytes_to_the_host_and_waits_once_more(
    script: str, words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, simulated_gpus: None
) -> None:
    (counters := folder / "counters").mkdir()
    monkeypatch.setenv("SIMULATED_CUDA_COUNTERS", str(counters))
    training = Training(script, 2, STEPS, [*words, "--log-every", "1000"])
    with Watch(counters) as watch:
        training.run(
            folder / "run", proxied=True, options=("--snapshot-overhead", "0", "--validate-every", "0")
        )
    servers = [seen for seen in watch.seen.values() if seen[-1].commits > STEPS // 2]
    assert len(servers) == 2
    for seen in servers:
        # Until replicas are known all that they hold is copied to the host.
        first = next(one for one in seen if one.commits >= 0.6 * STEPS)
        last = next(one for one in seen if one.commits >= 0.9 * STEPS)
        commits = last.commits - first.commits
        waits, came = (last.waits - first.waits) / commits, (last.to_host - first.to_host) / commits
        digested = (last.digested - first.digested) / commits
        print(f"a step: {waits:.2f} waits, {came:.0f} of {digested:.0f} digested, {came / digested:.2%}")
        assert 0 < came <= MOST * digested
        assert OWN_WAITS <= waits < OWN_WAITS + 1.1  # the two looks come amid steps
