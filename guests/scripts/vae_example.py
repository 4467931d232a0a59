"""pytorch/examples vae/main.py: `randn_like` on the device, Adam, samples and reconstructions: `vae_example.py DATA`.

The example seeds once; this one before each step, epoch and test, so that a device's noise is the CPU's.
"""

import sys

import torch
from digits import digits
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 400)
        self.fc21 = nn.Linear(400, 20)
        self.fc22 = nn.Linear(400, 20)
        self.fc3 = nn.Linear(20, 400)
        self.fc4 = nn.Linear(400, 784)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 784))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 784), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


torch.manual_seed(1)
on_gpu = torch.accelerator.is_available()
device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
more = {"num_workers": 1, "pin_memory": True} if on_gpu else {}
images, _ = digits(sys.argv[1], 160)
pictures = images[:, None] / 255
train_loader = DataLoader(pictures[:96], batch_size=16, shuffle=True, **more)
test_loader = DataLoader(pictures[96:], batch_size=16, **more)
model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)
for epoch in (1, 2):
    torch.manual_seed(epoch)
    model.train()
    train_loss = 0
    for index, data in enumerate(train_loader):
        torch.manual_seed(1000 * epoch + index)
        data = data.to(device)
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        loss = loss_function(recon, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for index, data in enumerate(test_loader):
            torch.manual_seed(index)
            data = data.to(device)
            recon, mu, logvar = model(data)
            test_loss += loss_function(recon, data, mu, logvar).item()
            comparison = torch.cat([data[:8], recon.view(16, 1, 28, 28)[:8]]).cpu()
        torch.manual_seed(epoch)
        sample = model.decode(torch.randn(64, 20).to(device)).cpu()
    print("KEPT", epoch, train_loss, test_loss, comparison.sum().item(), sample.sum().item(), flush=True)
