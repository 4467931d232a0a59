"""What a launcher waits for, and who a rank is by its launcher's word (paper 001 §3.2)."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch
from jit_shards import complete, identity, opened, text

from understudy.jit import choosing
from understudy.jit.identity import Identity, JitError
from understudy.jit.storage import ShardDirectory, wait_for_shards

# Launchers.


def test_a_launcher_is_told_at_once_when_a_step_has_all_shards(tmp_path: Path) -> None:
    complete(tmp_path, 3)

    choice = wait_for_shards(tmp_path, timeout=0)

    assert choice.step == 3 and choice.paths["s1"].read_text() == "s1 of 3"


def test_a_launcher_waits_for_the_last_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = opened(tmp_path)
    work = [lambda: first.save(5, text("a"), ""), lambda: second.save(5, text("b"), "")]
    monkeypatch.setattr(choosing.time, "sleep", lambda seconds: work.pop(0)())

    assert wait_for_shards(tmp_path, timeout=600).step == 5
    assert not work


def test_a_launcher_is_told_which_shards_lack(tmp_path: Path) -> None:
    ranks = opened(tmp_path, 3)
    ranks[0].save(5, text(""), "")
    ranks[2].save(4, text(""), "")

    with pytest.raises(JitError, match="step 5 lacks the shards s1, s2; step 4 lacks the shards s0, s1"):
        wait_for_shards(tmp_path, timeout=0)


def test_what_an_earlier_attempt_saved_is_not_what_a_launcher_waits_for(tmp_path: Path) -> None:
    complete(tmp_path, 3)
    opened(tmp_path, attempt="second")

    with pytest.raises(JitError, match="nobody has saved any of the shards s0, s1"):
        wait_for_shards(tmp_path, timeout=0)


def test_a_launcher_may_wait_before_there_is_anything(tmp_path: Path) -> None:
    with pytest.raises(JitError, match="there is no directory of shards yet"):
        wait_for_shards(tmp_path / "ckpt", timeout=0)
    ShardDirectory(tmp_path / "ckpt", identity()).announce()
    with pytest.raises(JitError, match="1 of 2 ranks have announced"):
        wait_for_shards(tmp_path / "ckpt", timeout=0)


# Identities.


def test_the_launchers_variables_say_who_a_rank_is(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "RANK": "2", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "1",
        "MASTER_ADDR": "here", "MASTER_PORT": "1",
    }  # fmt: skip
    for name, value in names.items():
        monkeypatch.setenv(name, value)

    first = Identity.of(shard="0")
    monkeypatch.setenv("RANK", "3")
    second = Identity.of(shard="0", job="named")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    third = Identity.of(shard="0")

    assert (first.rank, first.world_size, first.job, second.job) == (2, 4, "run", "named")
    assert first.attempt == second.attempt != third.attempt
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(JitError, match="The variable RANK is 'x'"):
        Identity.of(shard="0")


def test_a_name_that_the_launcher_has_drawn_names_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    for run, job in ((str(uuid.uuid4()), "unnamed"), ("none", "unnamed"), ("nightly-4", "nightly-4")):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
        assert Identity.of(shard="0").job == job


def test_a_process_alone_has_an_attempt_of_its_own_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)

    first, second = Identity.of(shard="0"), Identity.of(shard="0")

    assert (first.rank, first.world_size, first.job) == (0, 1, "unnamed")
    assert first.attempt != second.attempt


def test_the_store_of_a_process_group_agrees_on_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    attempts = []
    for _ in range(2):
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        try:
            ranks = [Identity.of(shard="0") for _ in range(2)]
        finally:
            torch.distributed.destroy_process_group()
        assert ranks[0] == ranks[1] and ranks[0].rank == 0
        attempts.append(ranks[0].attempt)

    assert attempts[0] != attempts[1]
