"""Programs of frameworks that bring a loop, or an optimizer's use, of their own."""

from __future__ import annotations

from catalogue import Program

OTHER_LISTS = "autocast on the CPU has other lists of operators"
ON_DEVICE = "it draws random numbers on the device, where it is not seeded before each step"
ACCELERATE = (
    "accelerate", "launch", "--num_processes", "1", "--num_machines", "1", "--dynamo_backend", "no",
)  # fmt: skip
DEEPSPEED = ("deepspeed", "--num_gpus", "2", "--master_port", "29617", "--no_local_rank")

PROGRAMS = (
    Program(
        "lightning_ddp", "lightning", ("lightning_fit.py", "{data}", "{out}", "2", "32-true"), ranks=2,
        defaults="Trainer's own launcher: DDP; ModelCheckpoint, EarlyStopping, monitors, TensorBoard, resuming",
    ),
    Program(
        "lightning_fp16", "lightning", ("lightning_fit.py", "{data}", "{out}", "1", "16-mixed"),
        defaults="the same on one rank with precision=16-mixed: GradScaler", not_natively=OTHER_LISTS,
    ),
    Program(
        "diffusers_unconditional", "diffusers", ("unconditional_diffusion.py", "{data}", "{out}"),
        defaults="accelerate, float16, EMA, checkpoints, images by a pipeline", not_natively=OTHER_LISTS,
        launcher=(*ACCELERATE, "--mixed_precision", "fp16"),
    ),
    Program(
        "stable_baselines3_ppo", "stable_baselines3", ("policies.py", "PPO", "{out}"),
        defaults="device auto, actions drawn on the device, saved and loaded", not_natively=ON_DEVICE,
    ),
    Program(
        "stable_baselines3_dqn", "stable_baselines3", ("policies.py", "DQN", "{out}"),
        defaults="replay buffer, target network, saved and loaded",
    ),
    Program(
        "torch_geometric", "torch-geometric", ("graph_networks.py",),
        defaults="GCN, GAT, SAGE, top-k and global pooling: scatter and gather",
    ),
    Program(
        "gpytorch", "gpytorch", ("gaussian_process.py",), defaults="exact Gaussian process: Cholesky, predictions",
    ),
    Program(
        "skorch", "skorch", ("grid_search.py",), defaults="a classifier in scikit-learn's GridSearchCV",
        environment="frameworks",
    ),
    *(
        Program(
            f"deepspeed_zero{stage}_{kind}", "deepspeed", ("zero_stages.py", "{data}", "{out}", str(stage), kind), ranks=2,
            defaults=f"its launcher, ZeRO {stage} in {kind}, overlapped reduction, checkpoint saved and loaded",
            launcher=DEEPSPEED, environment="deepspeed",
            not_natively="DeepSpeed refuses float16 on the CPU" if kind == "fp16" else "",
        )
        for stage, kind in ((2, "fp32"), (2, "fp16"), (3, "bf16"))
    ),
)  # fmt: skip
