"""What paper 001 prints, as data: the tables that its §5 and §6.5 are computed from, and their results.

Seconds, unless a name says otherwise; percentages as the paper has them.
"""

from __future__ import annotations

from dataclasses import dataclass

SECONDS_PER_DAY = 86_400.0
FAILURES_PER_GPU_DAY = 2e-3
"""§6.5, from OPT's log: about two a day on 992 GPUs."""
FAILURE_RATE = FAILURES_PER_GPU_DAY / SECONDS_PER_DAY
"""f: per GPU and second."""
SIZES = (4, 1024, 8192)
"""N of Table 8."""


@dataclass(frozen=True)
class Workload:
    """A row of Table 4, user-level checkpoints, with the number of GPUs of Table 2."""

    name: str
    gpus: int
    checkpoint: float
    """o."""
    restore: float
    """r."""
    recovery: float
    """Checkpoint and restore, as measured."""
    minibatch: float
    """m."""
    overhead: float
    """Per minibatch; 0 where none could be measured."""

    @property
    def steady_overhead(self) -> float:
        """o_jit: seconds per useful second."""
        return self.overhead / self.minibatch


WORKLOADS = (
    Workload("BERT-L-PT", 8, 5.0, 9.9, 14.8, 0.418, 0.00003),
    Workload("BERT-B-FT", 8, 1.4, 8.8, 10.1, 0.416, 0.0),
    Workload("GPT2-S", 4, 3.8, 7.2, 10.35, 0.629, 0.00001),
    Workload("GPT2-XL", 8, 6.7, 14.0, 20.6, 2.632, 0.0),
    Workload("GPT2-8B", 16, 18.8, 28.6, 46.9, 2.953, 0.0),
    Workload("GPT2-18B", 32, 20.5, 34.2, 54.8, 3.474, 0.0),
    Workload("T5-3B", 8, 7.6, 35.25, 42.65, 0.498, 0.0),
    Workload("ViT", 8, 4.6, 20.2, 24.4, 0.292, 0.0),
)
"""Table 4; GPUs of Table 2."""
BY_NAME = {workload.name: workload for workload in WORKLOADS}


@dataclass(frozen=True)
class Transparent:
    """A row of Table 5, transparent recovery from transient errors on 8 V100 GPUs."""

    name: str
    recovery: float
    minibatch: float
    overhead: float

    @property
    def steady_overhead(self) -> float:
        """o_jit: seconds per useful second."""
        return self.overhead / self.minibatch


TRANSPARENT = (
    Transparent("BERT-B-FT", 2.1, 0.279, 0.0),
    Transparent("GPT2-S", 9.1, 0.270, 0.001),
    Transparent("GPT2-S-3D", 16.4, 0.209, 0.0),
    Transparent("Pyramidnet", 1.9, 0.315, 0.0),
)
"""Table 5, its upper half."""

PC_DISK = {
    "GPT2-S": 0.042,
    "GPT2-XL": 0.093,
    "GPT2-8B": 0.216,
    "GPT2-18B": 0.330,
    "BERT-L-PT": 0.07,
    "BERT-B-FT": 0.039,
}
"""Table 3: percent of the time that checkpoints by `torch.save` to a disk take, at the optimal frequency."""
PC_MEM = {
    "GPT2-S": 0.042,
    "GPT2-XL": 0.078,
    "GPT2-8B": 0.186,
    "GPT2-18B": 0.275,
    "BERT-L-PT": 0.068,
    "BERT-B-FT": 0.036,
}
"""Table 3: percent of the time that checkpoints to a tmpfs take, at the optimal frequency."""
CHECKFREQ = {
    "GPT2-S": 0.024,
    "GPT2-XL": 0.047,
    "GPT2-8B": 0.111,
    "GPT2-18B": 0.166,
    "BERT-L-PT": 0.031,
    "BERT-B-FT": 0.026,
}
"""Table 3: likewise, copied and then written behind the training."""
PC_DAILY = {
    "GPT2-S": 0.004,
    "GPT2-XL": 0.007,
    "GPT2-8B": 0.02,
    "GPT2-18B": 0.02,
    "BERT-L-PT": 0.005,
    "BERT-B-FT": 0.0016,
}
"""Table 3: percent with one checkpoint a day, to a tmpfs: o of Table 4 over a day, cut."""
JIT_C = {
    "GPT2-S": 0.0024,
    "GPT2-XL": 0.0,
    "GPT2-8B": 0.0,
    "GPT2-18B": 0.0,
    "BERT-L-PT": 0.0076,
    "BERT-B-FT": 0.0,
}
"""Table 3: headed as percentages; Table 8 has taken them for fractions."""


@dataclass(frozen=True)
class Printed:
    """A row of Table 8: for each of SIZES."""

    name: str
    per_hour: tuple[float, ...]
    """c*; empty for ways that have none."""
    percent: tuple[float, ...]
    """w_f."""
    unit: tuple[float, ...]
    """Of the last digit of each percentage."""


PERIODIC = (
    Printed("BERT-L-PT", (0.34, 5.54, 15.6), (0.096, 1.53, 4.5), (0.001, 0.01, 0.1)),
    Printed("BERT-B-FT", (0.65, 10.47, 29.62), (0.05, 0.83, 2.41), (0.01, 0.01, 0.01)),
    Printed("GPT2-S", (0.39, 6.35, 17.98), (0.08, 1.34, 3.78), (0.01, 0.01, 0.01)),
    Printed("GPT2-8B", (0.17, 2.85, 8.08), (0.18, 2.96, 8.24), (0.01, 0.01, 0.01)),
)
USER_LEVEL = (
    Printed("BERT-L-PT", (), (0.75, 0.77, 0.94), (0.01, 0.01, 0.01)),
    Printed("BERT-B-FT", (), (0.23, 0.26, 0.41), (0.01, 0.01, 0.01)),
    Printed("GPT2-S", (), (0.24, 0.26, 0.38), (0.01, 0.01, 0.01)),
    Printed("GPT2-8B", (), (0.0003, 0.07, 0.56), (0.0001, 0.01, 0.01)),
)
TRANSIENT = (
    Printed("BERT-B-FT", (), (0.69, 0.69, 0.69), (0.01, 0.01, 0.01)),
    Printed("GPT2-S", (), (0.69, 0.69, 0.7), (0.01, 0.01, 0.1)),
)

HOURS_TO_CHECKPOINT = 6.0
"""Eq. 9: c* = √N / 6 hours for BERT-L-PT."""
OF_ROOT_N, OF_N = 4.8e-4, 2.3e-7
"""Eq. 10: w* = 4.8e-4 √N + 2.3e-7 N for BERT-L-PT."""
DOLLARS_A_MONTH = {1_000: 30_000.0, 10_000: 3_000_000.0}
"""§5.1: one failure a day per 1,000 GPUs, checkpoints each half hour, $4 per GPU-hour."""
