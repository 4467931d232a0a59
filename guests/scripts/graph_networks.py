"""PyTorch Geometric after its tutorials: a network of GCN, GAT and SAGE layers with pooling that classifies small graphs."""

import torch
from shared import DEVICE
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GCNConv, SAGEConv, TopKPooling, global_max_pool, global_mean_pool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gcn, self.gat, self.sage = GCNConv(8, 32), GATConv(32, 8, heads=4), SAGEConv(32, 32)
        self.pool = TopKPooling(32, ratio=0.8)
        self.last = nn.Linear(64, 2)

    def forward(self, data):
        x = self.gcn(data.x, data.edge_index).relu()
        x = self.gat(x, data.edge_index).relu()
        x, edges, _, batch, _, _ = self.pool(x, data.edge_index, None, data.batch)
        x = self.sage(x, edges).relu()
        return self.last(torch.cat([global_mean_pool(x, batch), global_max_pool(x, batch)], dim=1))


def graph(number: int) -> Data:
    """Random; its class is how many edges it has."""
    count = 10 + number % 7
    edges = torch.randint(count, (2, count * (2 + number % 2)))
    return Data(x=torch.randn(count, 8), edge_index=edges, y=torch.tensor([number % 2]))


torch.manual_seed(12345)
loader = DataLoader([graph(number) for number in range(64)], batch_size=16, shuffle=True)
model = Net().to(DEVICE)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(3):
    for data in loader:
        data = data.to(DEVICE)
        loss = nn.functional.cross_entropy(model(data), data.y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    right = sum(int((model(data.to(DEVICE)).argmax(1).cpu() == data.cpu().y).sum()) for data in loader)
    print("KEPT", epoch, loss.item(), right, flush=True)
