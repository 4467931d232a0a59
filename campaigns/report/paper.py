"""What the papers print, where our tables have a counterpart: beside ours, of other machines, and no aim.

Paper 002 (ECRL): 8 suites, one seed, 4 of 6 GPUs (RTX 4090 and 3090), ResNets on CIFAR; its reference
checkpoints, too. Paper 001 (just-in-time checkpoints): tables 6 and 7; its tables 4 and 5 are in
`recovery/costs/given/paper.py`. Seconds, if nothing else is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ELSEWHERE_002 = "another machine (4 GPUs of an RTX 4090/3090 host), with other models and data, and one seed"
ELSEWHERE_001 = "other machines (8 V100 or 4 A100 GPUs with NCCL), with other models"


@dataclass(frozen=True)
class Aggregate:
    """A row of paper 002, Table 5."""

    reference: float
    blocking: float
    overlapped: float


TABLE_5: Mapping[str, Aggregate] = {
    "passed": Aggregate(1.0, 1.0, 1.0),
    "goodput": Aggregate(10.9284, 9.4560, 9.6433),
    "drop": Aggregate(0.0, -13.2466, -11.5026),
    "restarts": Aggregate(0.0, 2.0, 2.0),
    "wall": Aggregate(157.1323, 181.3431, 177.7858),
    "stall": Aggregate(18.0629, 18.0859, 7.8654),
    "write": Aggregate(17.8939, 17.9036, 1.3811),
    "snapshot": Aggregate(0.0295, 0.0324, 0.0328),
}
GAIN = 1.9931
"""Percent, overlapped over blocking, mean of 8 suites (Table 5)."""
STALL_REDUCTION, WRITE_REDUCTION = 56.5110, 92.2858
"""Percent of blocking's (§7.1)."""
LOSS_DIFFERENCE = {"blocking": 0.0660, "overlapped": 0.0669}
"""Eq. 8: mean absolute loss difference to the reference."""


@dataclass(frozen=True)
class SuiteRow:
    """A row of paper 002, Tables 6 and 8. Steps per second, percent, seconds."""

    data: str
    model: str
    failure: str
    reference: float
    blocking: float
    overlapped: float
    gain: float
    blocking_stall: float
    overlapped_stall: float
    wall_difference: float


TABLE_8 = (
    SuiteRow("CIFAR-10", "ResNet-18", "base", 11.7289, 11.3023, 11.5721, 2.3869, 11.0699, 6.1273, -3.3002),
    SuiteRow("CIFAR-10", "ResNet-18", "late", 13.3230, 11.2143, 11.2408, 0.2358, 10.8221, 5.8818, -0.3357),
    SuiteRow("CIFAR-10", "ResNet-50", "base", 8.5743, 6.7222, 6.8576, 2.0142, 24.2825, 9.7517, -4.6996),
    SuiteRow("CIFAR-10", "ResNet-50", "late", 7.2259, 6.6058, 6.8030, 2.9853, 24.7192, 10.1076, -7.0211),
    SuiteRow("CIFAR-100", "ResNet-18", "base", 14.9770, 12.5790, 12.7443, 1.3142, 11.1750, 5.1956, -1.6500),
    SuiteRow("CIFAR-100", "ResNet-18", "late", 14.5657, 12.2979, 12.7471, 3.6527, 11.7959, 5.1019, -4.5848),
    SuiteRow("CIFAR-100", "ResNet-50", "base", 8.6444, 7.6277, 7.8637, 3.0946, 24.2103, 10.2728, -6.2965),
    SuiteRow("CIFAR-100", "ResNet-50", "late", 8.3879, 7.2988, 7.3179, 0.2609, 26.6126, 10.4842, -0.5705),
)


@dataclass(frozen=True)
class Slice:
    """A row of paper 002, Table 7: overlapped against blocking."""

    slice: str
    group: str
    gain: float
    stall: float
    loss: float


TABLE_7 = (
    Slice("data", "CIFAR-10", 1.9055, -9.7563, 0.0009),
    Slice("data", "CIFAR-100", 2.0806, -10.6848, 0.0009),
    Slice("model", "ResNet-18", 1.8974, -5.6390, 0.0018),
    Slice("model", "ResNet-50", 2.0888, -14.8021, 0.0000),
    Slice("faults", "base", 2.2025, -9.8476, 0.0012),
    Slice("faults", "late", 1.7837, -10.5935, 0.0006),
)


@dataclass(frozen=True)
class Hard:
    """A row of paper 001, Table 6: recovery from hard errors, transparent."""

    name: str
    gpus: str
    healthy: float
    failed: float
    minibatch: float


TABLE_6_OF_001 = (
    Hard("BERT-B-FT", "8 × V100", 25.72, 21.02, 0.243),
    Hard("GPT2-S", "8 × V100", 23.97, 20.85, 0.210),
    Hard("GPT2-S-3D", "8 × V100", 23.07, 18.11, 0.156),
    Hard("Pyramidnet", "8 × V100", 38.42, 30.34, 0.270),
    Hard("BERT-B-FT", "4 × A100", 17.19, 9.09, 0.084),
    Hard("GPT2-S", "4 × A100", 14.68, 8.55, 0.350),
    Hard("Pyramidnet", "4 × A100", 28.79, 17.56, 0.451),
)

TABLE_7_OF_001 = {
    "Delete communicators and GPU handles": (1.013, 0.779, 0.831, 0.850),
    "Recreate NCCL communicators": (1.054, 8.340, 15.54, 1.038),
    "Reset GPU buffers": (0.001, 0.001, 0.001, 0.002),
    "Recreate GPU handles": (0.006, 0.004, 0.004, 0.027),
    "Replay minibatch APIs": (0.006, 0.004, 0.002, 0.004),
}
"""Transient errors, one rank; of the models in MODELS_OF_TABLE_7."""
MODELS_OF_TABLE_7 = ("BERT-B-FT", "GPT2-S", "GPT2-S-3D", "Pyramidnet")
COUNTERPARTS_OF_TABLE_7 = {
    "Delete communicators and GPU handles": "restart",
    "Recreate NCCL communicators": "communicators",
    "Reset GPU buffers": "",
    "Recreate GPU handles": "",
    "Replay minibatch APIs": "replay",
}
"""Which part of ours has the same work in it; empty: another one has it."""
