"""DeepSpeedExamples' training/cifar/cifar10_deepspeed.py, its network and configuration, on digits; then a second engine loads the checkpoint.

`zero_stages.py DATA OUT STAGE fp32|fp16|bf16`; its optimizer is PyTorch's, as DeepSpeed's own is compiled by nvcc.
"""

import hashlib
import sys

import deepspeed
import torch
import torch.nn.functional as F
from digits import digits
from torch import nn

DATA, OUT, STAGE, KIND = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


CONFIG = {
    "train_batch_size": 16,
    "steps_per_print": 2000,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7, "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "bf16": {"enabled": KIND == "bf16"},
    "fp16": {"enabled": KIND == "fp16", "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2},
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": STAGE, "allgather_partitions": True, "reduce_scatter": True, "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000, "overlap_comm": True, "contiguous_gradients": True, "cpu_offload": False,
    },
}  # fmt: skip


def engine(data):
    torch.manual_seed(0)
    model = Net()
    parameters = [one for one in model.parameters() if one.requires_grad]
    made, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=parameters, training_data=data, config=CONFIG
    )
    return made, loader


def train(made, loader):
    kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[KIND]
    device = deepspeed.get_accelerator().device_name(made.local_rank)
    for pictures, labels in loader:
        outputs = made(pictures.to(device).to(kind))
        loss = F.cross_entropy(outputs, labels.to(device))
        made.backward(loss)
        made.step()
        print("KEPT", made.global_rank, made.global_steps, loss.item(), flush=True)


deepspeed.init_distributed()
images, labels = digits(DATA, 96)
pictures = F.interpolate(images[:, None] / 127.5 - 1, 32).expand(-1, 3, -1, -1).contiguous()
data = torch.utils.data.TensorDataset(pictures, labels)
first, loader = engine(data)
train(first, loader)
first.save_checkpoint(OUT, tag="cifar")
second, loader = engine(data)
second.load_checkpoint(OUT, tag="cifar")
train(second, loader)
parameters = list(second.module.parameters())
with deepspeed.zero.GatheredParameters(parameters):  # of stage 3 they are in pieces
    whole = b"".join(one.detach().float().cpu().numpy().tobytes() for one in parameters)
print("KEPT", len(whole), hashlib.sha256(whole).hexdigest(), flush=True)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
