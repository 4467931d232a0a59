"""pytorch/examples super_resolution/main.py: orthogonal weights, PixelShuffle, workers, whole modules saved, and super_resolve.py: `super_resolution_example.py DATA OUT`."""

import sys
from math import log10

import torch
from digits import digits
from torch import nn, optim
from torch.nn import functional, init
from torch.utils.data import DataLoader, TensorDataset

FACTOR = 2


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 64, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(64, 64, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(64, 32, (3, 3), (1, 1), (1, 1))
        self.conv4 = nn.Conv2d(32, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        for one in (self.conv1, self.conv2, self.conv3):
            init.orthogonal_(one.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv4.weight)

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        x = self.relu(self.conv3(x))
        return self.pixel_shuffle(self.conv4(x))


torch.manual_seed(123)
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
images, _ = digits(sys.argv[1], 64)
targets = images[:, None] / 255
small = functional.interpolate(targets, scale_factor=1 / FACTOR, mode="bicubic", antialias=True)
pictures = TensorDataset(small, targets)
training = DataLoader(torch.utils.data.Subset(pictures, range(48)), num_workers=2, batch_size=8, shuffle=True)
testing = DataLoader(torch.utils.data.Subset(pictures, range(48, 64)), num_workers=2, batch_size=8)
model = Net(FACTOR).to(device)
criterion = nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=0.01)
for epoch in (1, 2):
    epoch_loss = 0
    for batch in training:
        given, target = batch[0].to(device), batch[1].to(device)
        optimizer.zero_grad()
        loss = criterion(model(given), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
    avg_psnr = 0
    with torch.no_grad():
        for batch in testing:
            mse = criterion(model(batch[0].to(device)), batch[1].to(device))
            avg_psnr += 10 * log10(1 / mse.item())
    print("KEPT", epoch, epoch_loss / len(training), avg_psnr / len(testing), flush=True)
    torch.save(model, f"{sys.argv[2]}/model_epoch_{epoch}.pth")
saved = torch.load(f"{sys.argv[2]}/model_epoch_2.pth", weights_only=False)
out = saved(small[:1].to(device)).cpu()[0].detach()
print("KEPT", (out * 255.0).clip(0, 255).sum().item(), flush=True)
