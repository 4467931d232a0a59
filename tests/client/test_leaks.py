"""Nothing grows with the number of steps. `make leak-test` asks the same over 10,000 steps."""

from __future__ import annotations

import leak

STEPS = 1_500


def test_tables_memory_and_log_bytes_per_step_stay_as_they_are_over_many_steps() -> None:
    marks = leak.run(STEPS, timeout_s=120)
    assert [mark["step"] for mark in marks] == [STEPS * (n + 1) // 5 for n in range(5)]
    assert leak.complaints(marks) == []


def test_a_leak_of_any_kind_is_seen() -> None:
    steady = [
        {
            "step": 100 * n,
            "templates": 50,
            "address_blocks": 90,
            "dictionary_bytes": 9000,
            "private_bytes": 1 << 28,
            "server_private_bytes": 1 << 28,
            "log_bytes": 4000 * 100 * n,
        }
        for n in range(1, 6)
    ]
    assert leak.complaints(steady) == []
    for name in steady[0].keys() - {"step"}:
        grown = [dict(mark) for mark in steady]
        grown[-1][name] += 32 << 20
        assert len(leak.complaints(grown)) == 1, name
