"""The executor: records in, state and replies out; commits, rewinds, restores; records not to trust."""

from __future__ import annotations

import random
import struct

import pytest
import torch
from executor_harness import (
    ALLOCATE,
    COMMIT,
    DEVICE_TO_HOST,
    FLOAT,
    HOST_TO_DEVICE,
    MEMORY,
    OPERATOR,
    OPERATOR_SYNC,
    PHASE,
    SEED,
    Harness,
    anonymous_bytes,
    double,
    vector,
)

from understudy.replay import RemoteError


def test_an_executor_holds_the_word_of_its_log_until_another_one_has_it() -> None:
    with Harness() as h:
        first = h.log.server_life
        successor = h.new_executor()
        second = h.log.server_life
        h.executor.park()
        h.executor.resume()  # it is the one that goes on
        assert h.log.server_life == first
        successor.detach()
        assert h.log.server_life == first != second
        h.executor.park()
        h.executor.detach()
        assert h.log.server_life == 0
        assert min(first, second) & 0x80000000 and not (first | second) & 0x40000000


def test_an_operator_changes_the_buffer_it_is_given() -> None:
    with Harness() as h:
        h.new(1, [1, 2, 3, 4])
        h.new(2, [10, 20, 30, 40])
        h.add(1, 2)
        assert h.read(1) == (11, 22, 33, 44)


def test_a_rewind_in_place_and_replay_gives_the_same_values_and_compares_the_delivered_ones() -> None:
    with Harness() as h:
        h.new(1, [1, 1, 1, 1])
        h.new(2, [2, 2, 2, 2])
        h.commit()
        h.add(1, 2)
        assert h.read(1) == (3, 3, 3, 3)
        h.executor.park()
        h.executor.rewind(1)
        h.executor.resume()
        assert h.read(1) == (3, 3, 3, 3)
        assert (h.log.replies_compared, h.log.replies_different) == (1, 0)


def test_a_fresh_server_restores_a_commit_from_the_shadow_and_replays() -> None:
    with Harness() as h:
        h.new(1, [1, 1, 1, 1])
        h.new(2, [2, 2, 2, 2])
        for _ in range(3):
            h.commit()
            h.add(1, 2)
        h.synchronize()
        h.executor.park()
        h.executor = h.new_executor()
        h.executor.restore(h.log.commits()[-2].number)
        h.executor.resume()
        assert h.read(1) == (7, 7, 7, 7)


def drawn_around_a_commit(h: Harness) -> tuple[float, ...]:
    """Random numbers in buffer 1, as they are after the second time: behind the commit."""
    uniform = h.template("aten::uniform_", [*vector(), 7, 7, 11])
    draw = [1, double(0.0), double(1.0), 0]
    h.writer.append(SEED, 0, [1234])
    h.writer.append(OPERATOR, uniform, draw)
    h.commit()
    h.writer.append(OPERATOR, uniform, draw)
    return h.read(1)


def test_generators_are_part_of_a_commit() -> None:
    with Harness() as h:
        h.new(1, [0, 0, 0, 0])
        drawn = drawn_around_a_commit(h)
        h.executor.park()
        h.executor = h.new_executor()
        h.executor.restore(1)
        h.executor.resume()
        assert h.read(1) == drawn
        assert (h.log.replies_compared, h.log.replies_different) == (1, 0)


@pytest.mark.cpu_driver
def test_generators_go_back_in_place_though_the_shadow_is_full() -> None:
    with Harness(shadow_bytes=12 << 10) as h:
        h.new(1, [0, 0, 0, 0])
        h.new(2, [0] * 2048)
        drawn = drawn_around_a_commit(h)
        (commit,) = h.log.commits()
        assert commit.has_manifest and not commit.complete, "buffer 2 and the generator do not both fit"
        h.executor.park()
        h.executor.rewind(1)
        h.executor.resume()
        assert h.read(1) == drawn
        assert (h.log.replies_compared, h.log.replies_different) == (1, 0)


@pytest.mark.cpu_driver
def test_nobody_goes_back_to_a_commit_whose_generators_found_no_room() -> None:
    with Harness(shadow_bytes=4 << 10) as h:
        h.new(1, [0, 0, 0, 0])
        h.writer.append(SEED, 0, [1234])
        h.commit()
        h.synchronize()
        (commit,) = h.log.commits()
        assert not commit.has_manifest
        h.executor.park()
        with pytest.raises(Exception, match="manifest"):
            h.executor.rewind(1)


def test_a_shadow_that_was_changed_behind_our_back_is_refused() -> None:
    with Harness() as h:
        h.new(1, [1, 1, 1, 1])
        for _ in range(3):  # digests begin with what survives a commit
            h.commit()
            h.add(1, 1)
        h.synchronize()
        h.executor.park()
        h.spoil("shadow", (4, 4, 4, 4))
        h.executor = h.new_executor()
        with pytest.raises(RuntimeError, match="damaged"):
            h.executor.restore(3)


def test_an_error_of_the_program_is_raised_at_the_next_sync_and_names_the_operator() -> None:
    with Harness() as h:
        h.new(1, [1, 1, 1, 1])
        h.new(2, [1, 1, 1])
        key = [*vector(4), *vector(3), 17, double(1.0)]
        h.writer.append(OPERATOR, h.template("aten::add_.Tensor", key), [1, 2])
        with pytest.raises(RemoteError, match=r"size of tensor a \(4\) must match.*aten::add_.Tensor"):
            for _ in range(1000):
                h.read(1)


def test_an_error_of_a_synchronous_operator_is_not_sticky() -> None:
    with Harness() as h:
        h.new(1, [1, 1, 1, 1])
        h.new(2, [1, 1, 1])
        key = [*vector(4), *vector(3), 17, double(1.0)]
        with pytest.raises(RemoteError, match="must match"):
            h.writer.call(OPERATOR_SYNC, h.template("aten::add_.Tensor", key, []), [1, 2, 1000])
        assert h.read(1) == (1, 1, 1, 1)


@pytest.mark.parametrize("dimension", [4, 3])
def test_a_number_that_a_template_promises_is_compared_with_what_the_operator_gives(dimension: int) -> None:
    with Harness() as h:
        h.new(1, [1, 1, 1, 1])
        size = h.template("aten::size.int", [*vector(4), 6, 0], [3, dimension])
        h.writer.append(OPERATOR, size, [1])
        if dimension == 4:
            return h.synchronize()
        with pytest.raises(RemoteError, match=r"aten::size.int gave 4 where the worker expects 3"):
            h.synchronize()


REFUSED = ["aten::from_file", "aten::_pin_memory", "aten::pin_memory", "aten::set_data", "aten::save"]


@pytest.mark.parametrize("name", [*REFUSED, "aten::nonsense", "prim::Print", "c10d::allreduce_"])
def test_operators_outside_the_allowed_ones_are_refused_by_name(name: str) -> None:
    with Harness() as h:
        h.new(1, [1, 1, 1, 1])
        with pytest.raises(RemoteError, match=name.replace(".", r"\.")):
            h.writer.call(OPERATOR_SYNC, h.template(name, [2], []), [1, 1000])


def test_the_optimizer_phase_without_pre_images_closes_the_way_back() -> None:
    with Harness(optimizer_preimages=False) as h:
        h.new(1, [1, 1, 1, 1])
        h.new(2, [1, 1, 1, 1])
        h.commit()
        h.writer.append(PHASE, 1, [])
        h.add(1, 2)
        h.synchronize()
        h.executor.park()
        with pytest.raises(RuntimeError, match="out of reach"):
            h.executor.rewind(1)


def test_a_rank_parked_right_behind_its_optimizer_step_stands_at_a_commit() -> None:
    """Nothing has run behind the step yet, so the commit was still to come, and the one before is gone."""
    with Harness(optimizer_preimages=False) as h:
        h.new(1, [1, 1, 1, 1])
        h.new(2, [1, 1, 1, 1])
        h.commit()
        h.writer.append(PHASE, 1, [])
        h.add(1, 2)
        h.commit()
        h.run_all()
        assert (h.log.commit_count, h.log.phase) == (1, 1), "who parks now must not count on commit 1"
        h.executor.park()
        assert (h.log.commit_count, h.log.phase) == (2, 0)
        h.executor.rewind(2)
        h.executor.resume()
        assert h.read(1) == (2, 2, 2, 2)


def test_an_unprotected_rank_frees_its_log_at_every_commit() -> None:
    with Harness(protect=False, segment_count=2) as h:
        h.new(1, [0.0] * 4)
        for _ in range(40):  # 20 MB through a log of 8 MB
            h.writer.append(ALLOCATE, 2, [1 << 19])
            h.writer.append(HOST_TO_DEVICE, 2, [0, 1 << 19, *([0] * (1 << 16))])
            h.writer.free_later(2)
            h.commit()
        h.synchronize()
        assert h.log.freed_segments >= 3


def test_a_full_log_without_commits_is_relieved_by_a_commit_of_the_server() -> None:
    with Harness(protect=False, segment_count=2) as h:
        for handle in range(40):
            h.writer.append(ALLOCATE, handle + 1, [1 << 19])
            h.writer.append(HOST_TO_DEVICE, handle + 1, [0, 1 << 19, *([0] * (1 << 16))])
        h.synchronize()
        assert h.log.commit_count > 0


def test_a_full_log_of_a_rank_whose_peers_do_not_follow_is_cut_and_says_so() -> None:
    with Harness(segment_count=2) as h:  # nobody moves its floor
        for handle in range(1, 30):
            h.writer.append(ALLOCATE, handle, [1 << 19])
            h.writer.append(HOST_TO_DEVICE, handle, [0, 1 << 19, *([0] * (1 << 16))])
        h.synchronize()
        assert h.log.degraded == 1
        h.commit()
        h.add(1, 2)
        h.synchronize()
        assert h.log.degraded == 0, "a complete commit can be gone back to again"


def test_storages_of_sizes_that_never_come_back_are_not_kept() -> None:
    with Harness() as h:
        sizes = [(1 << 20) + 4096 * n for n in range(300)]
        for handle, size in enumerate(sizes, 1):
            h.writer.append(ALLOCATE, handle, [size])
            h.commit()
            h.writer.append(PHASE, 0, [])
            h.writer.free_later(handle)
            h.synchronize()
            h.log.floor_commit = h.log.commit_count
        statistics = struct.unpack("<14Q", h.writer.call(MEMORY, 0, []))
        live, reserved = statistics[0], statistics[8]
        assert live <= sizes[-1]
        assert reserved - live < 80 << 20 < sum(sizes) // 5


HOSTILE = {
    "a buffer that does not exist": lambda h: h.writer.append(DEVICE_TO_HOST, 77, [1, 0, 0, 16]),
    "a payload behind the end of its buffer": lambda h: h.writer.append(HOST_TO_DEVICE, 1, [8, 16, 0, 0]),
    "an offset that wraps around": lambda h: h.writer.append(HOST_TO_DEVICE, 1, [2**64 - 8, 16, 0, 0]),
    "a payload longer than its record": lambda h: h.writer.append(HOST_TO_DEVICE, 1, [0, 1 << 40]),
    "a template outside the dictionary": lambda h: h.writer.append(OPERATOR, 1 << 60, [1]),
    "a template that is not aligned": lambda h: h.writer.append(OPERATOR, 3, [1]),
    "too few values": lambda h: h.writer.append(
        OPERATOR, h.template("aten::add_.Tensor", [*vector(), *vector(), 7]), [1]
    ),
    "too few arguments": lambda h: h.writer.append(OPERATOR, h.template("aten::add_.Tensor", vector()), [1]),
    "a tensor larger than its buffer": lambda h: h.writer.append(
        OPERATOR, h.template("aten::zero_", vector(1 << 20)), [1]
    ),
    "a tensor whose extent overflows": lambda h: h.writer.append(
        OPERATOR,
        h.template("aten::zero_", [1 | FLOAT << 8 | 2 << 16, 0, 1 << 62, 1 << 62, 1 << 62, 1 << 62]),
        [1],
    ),
    "a negative stride": lambda h: h.writer.append(
        OPERATOR, h.template("aten::zero_", [1 | FLOAT << 8 | 1 << 16, 0, 4, 2**64 - 1]), [1]
    ),
    "an unknown element type": lambda h: h.writer.append(
        OPERATOR, h.template("aten::zero_", vector(dtype=200)), [1]
    ),
    "a list longer than its template": lambda h: h.writer.append(
        OPERATOR, h.template("aten::_foreach_zero_", [4 | (1 << 40)]), [1]
    ),
    "an argument of the wrong type": lambda h: h.writer.append(
        OPERATOR, h.template("aten::zero_", [6, 5]), []
    ),
    "a buffer of impossible size": lambda h: h.writer.append(ALLOCATE, 5, [1 << 62]),
    "a handle allocated twice": lambda h: h.writer.append(ALLOCATE, 1, [16]),
    "a handle freed twice": lambda h: (
        h.writer.free_later(1),
        h.writer.free_later(1),
        h.writer.append(COMMIT, 0, []),
    ),
    "an unknown phase": lambda h: h.writer.append(PHASE, 9, []),
    "an unknown setting": lambda h: h.writer.append(14, 99, [1]),
    "an unknown communicator": lambda h: h.writer.append(17, 4, [0] * 8),
    "an impossible communicator": lambda h: h.writer.append(15, 4, [1, 2, 9, 2, 1000]),
    "an unknown kind": lambda h: h.writer.append(1234, 0, []),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_record_ends_its_own_session_with_an_error(what: str) -> None:
    with Harness() as h, Harness() as bystander:
        h.new(1, [1, 1, 1, 1])
        bystander.new(1, [5, 5, 5, 5])
        HOSTILE[what](h)
        with pytest.raises(RemoteError):
            h.synchronize()
        assert bystander.read(1) == (5, 5, 5, 5)


@pytest.mark.parametrize("seed", range(60))
def test_random_bytes_in_records_and_templates_never_bring_the_server_down(seed: int) -> None:
    rng = random.Random(seed)
    with Harness() as h:
        h.new(1, [1, 1, 1, 1])
        h.new(2, [1, 1, 1, 1])
        names = [
            "aten::add_.Tensor",
            "aten::cat",
            "aten::mm",
            "aten::_foreach_add_.List",
            "aten::index.Tensor",
            "aten::sum",
        ]

        def word() -> int:
            return rng.choice(
                [
                    0,
                    1,
                    2,
                    3,
                    4,
                    5,
                    6,
                    7,
                    8,
                    2**63,
                    2**64 - 1,
                    rng.getrandbits(64),
                    *vector(),
                    rng.getrandbits(10),
                ]
            )

        try:
            for _ in range(30):
                name = rng.choice(names)
                key = [
                    rng.choice([*vector(), word(), 4 | 2 << 8, 12 | 1 << 8]) for _ in range(rng.randrange(12))
                ]
                out = [word() for _ in range(rng.randrange(4))]
                body = [rng.choice([1, 2, word()]) for _ in range(rng.randrange(6))]
                kind = rng.choice([OPERATOR, OPERATOR, OPERATOR_SYNC, *range(1, 18)])
                aux = (
                    h.template(name, key, out)
                    if kind in (OPERATOR, OPERATOR_SYNC)
                    else rng.choice([0, 1, 2, word()])
                )
                if kind in (OPERATOR_SYNC, DEVICE_TO_HOST, 9):
                    h.writer.call(kind, aux, body)
                else:
                    h.writer.append(kind, aux, body)
            h.synchronize()
        except RemoteError:
            pass
        # Had the executor crashed, this whole process would be gone; and it must still obey.
        h.executor.park()
        assert h.executor.state in ("ended", "parked")


def test_operators_that_write_undeclared_arguments_really_do() -> None:
    """Each CPU row of kUndeclaredWrites changes what its schema does not mark as written."""
    x, weight, bias = torch.randn(8, 3), torch.ones(3), torch.zeros(3)
    mean, variance = torch.zeros(3), torch.ones(3)
    torch.ops.aten.native_batch_norm(x, weight, bias, mean, variance, True, 0.1, 1e-5)
    assert not torch.equal(mean, torch.zeros(3)) and not torch.equal(variance, torch.ones(3))
    mean, variance = torch.zeros(3), torch.ones(3)
    torch.ops.aten.batch_norm_update_stats(x, mean, variance, 0.1)
    assert not torch.equal(mean, torch.zeros(3)) and not torch.equal(variance, torch.ones(3))


@pytest.mark.cpu_driver
def test_a_session_that_ends_gives_its_memory_back_to_the_system() -> None:
    buffers, floats = 8, 4 << 20  # of 16 MiB: from the heap, which keeps what is freed meanwhile
    before = anonymous_bytes()
    with Harness() as harness:
        for handle in range(1, 1 + buffers):
            harness.writer.append(ALLOCATE, handle, [4 * floats])
            key = [*vector(floats), 17, double(1.0)]
            harness.writer.append(OPERATOR, harness.template("aten::fill_.Scalar", key), [handle])
        harness.synchronize()
        assert anonymous_bytes() - before > buffers * 4 * floats * 3 // 4
    assert anonymous_bytes() - before < buffers * 4 * floats // 2


def test_a_server_that_was_held_goes_on_where_it_stood_with_what_came_meanwhile() -> None:
    with Harness() as h:
        h.new(1, [1, 1, 1, 1])
        h.synchronize()
        h.executor.hold()
        assert h.executor.state == "parked"
        h.add(1, 1)
        assert h.log.cursor_index < h.log.tail_index
        h.executor.let_go()
        assert h.read(1) == (2, 2, 2, 2)


def hold_amid_a_step(h: Harness) -> None:
    """Out of which no way leads, as it keeps no pre-images."""
    h.new(1, [1, 1, 1, 1])
    h.writer.append(PHASE, 1, [])
    h.add(1, 1)
    h.synchronize()
    h.executor.hold()


def test_a_server_is_not_held_amid_a_step_out_of_which_no_way_leads() -> None:
    with Harness(optimizer_preimages=False) as h:
        hold_amid_a_step(h)
        assert h.executor.state == "running"
        h.add(1, 1)
        h.synchronize()
        assert h.log.sealed
        h.commit()
        h.add(1, 1)
        h.wait(lambda: h.executor.state == "parked", "was not held")
        assert not h.log.sealed
        assert h.log.cursor_index == h.log.tail_index - 1
        h.executor.let_go()
        assert h.read(1) == (8, 8, 8, 8)


def test_a_call_that_fails_where_a_server_is_to_be_held_is_told() -> None:
    """Nobody takes it back for that: it would be let go in the middle of the call."""
    with Harness(optimizer_preimages=False) as h:
        hold_amid_a_step(h)
        h.log.add_drill(3, 1, h.log.call + 1)  # call-error
        h.add(1, 1)
        assert h.executor.wait_for_fault(20_000)[0] == "call"
        h.executor.let_go()
        assert h.executor.state == "parked"


def test_a_server_that_stands_at_a_fault_of_its_own_is_not_let_go() -> None:
    with Harness() as h:
        h.new(1, [1, 1, 1, 1])
        h.synchronize()
        h.log.add_drill(3, 1, 4)  # call-error
        h.add(1, 1)
        assert h.executor.wait_for_fault(20_000)[0] == "call"
        h.executor.hold()
        h.executor.let_go()
        assert h.executor.state == "parked"
