"""Training as fp16 autocast has it by default: attention with weights, soft targets, counts of integers."""

import torch

torch.manual_seed(5)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = torch.nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed, weights = self.attention(x, x, x, need_weights=True)
        return self.head(mixed.mean(1)) + torch.softmax(weights.half(), -1, dtype=torch.float32).sum()


model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scaler = torch.amp.GradScaler("cuda")
loss_of = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
for step in range(12):
    x = torch.randn(4, 6, 16, device="cuda")
    targets = torch.rand(4, 10, device="cuda").softmax(-1)
    with torch.autocast("cuda", dtype=torch.float16):
        logits = model(x)
        loss = loss_of(logits, targets) - torch.log_softmax(logits.half(), -1, dtype=torch.float32).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    experts = torch.histc(logits.argmax(-1).int(), bins=10, min=0, max=9)
    print(f"{step} {loss.item().hex()} {experts.tolist()}\n", end="", flush=True)  # in one piece
digest = torch.hash_tensor(torch.cat([p.detach().flatten() for p in model.parameters()]))
print(f"parameters {digest.item()}\n", end="")
