"""pytorch/examples dcgan/main.py: two networks, two optimizers, cudnn.benchmark, workers: `dcgan_example.py DATA OUT`.

The example seeds once; this one before all that draws on the device, each epoch and each step, so that a device's noise is the CPU's.
"""

import sys
from itertools import pairwise

import torch
import torch.backends.cudnn as cudnn
from digits import digits
from torch import nn, optim
from torch.utils.data import DataLoader

NZ, NGF, NDF, NC = 16, 8, 8, 1


def weights_init(module):
    kind = module.__class__.__name__
    if "Conv" in kind:
        torch.nn.init.normal_(module.weight, 0.0, 0.02)
    elif "BatchNorm" in kind:
        torch.nn.init.normal_(module.weight, 1.0, 0.02)
        torch.nn.init.zeros_(module.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (NZ, NGF * 8, NGF * 4, NGF * 2, NGF)
        layers = []
        for number, (before, after) in enumerate(pairwise(widths)):
            stride, padding = (2, 1) if number else (1, 0)
            layers += [
                nn.ConvTranspose2d(before, after, 4, stride, padding, bias=False),
                nn.BatchNorm2d(after),
            ]
            layers.append(nn.ReLU(True))
        self.main = nn.Sequential(*layers, nn.ConvTranspose2d(NGF, NC, 4, 2, 1, bias=False), nn.Tanh())

    def forward(self, x):
        return self.main(x)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (NDF, NDF * 2, NDF * 4, NDF * 8)
        layers = [nn.Conv2d(NC, NDF, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after)]
            layers += [nn.LeakyReLU(0.2, inplace=True)]
        self.main = nn.Sequential(*layers, nn.Conv2d(NDF * 8, 1, 4, 1, 0, bias=False), nn.Sigmoid())

    def forward(self, x):
        return self.main(x).view(-1, 1).squeeze(1)


torch.manual_seed(1)
cudnn.benchmark = True
on_gpu = torch.accelerator.is_available()
device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
images, _ = digits(sys.argv[1], 48)
pictures = nn.functional.interpolate(images[:, None] / 127.5 - 1, 64)
loader = DataLoader(pictures, batch_size=8, shuffle=True, num_workers=2)
netG, netD = Generator().to(device), Discriminator().to(device)
torch.manual_seed(0)
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCELoss()
torch.manual_seed(0)
fixed_noise = torch.randn(8, NZ, 1, 1, device=device)
optimizerD = optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))
for epoch in range(2):
    torch.manual_seed(epoch)
    for index, data in enumerate(loader):
        torch.manual_seed(1000 * epoch + index)
        netD.zero_grad()
        real = data.to(device)
        label = torch.full((real.size(0),), 1, dtype=real.dtype, device=device)
        errD_real = criterion(netD(real), label)
        errD_real.backward()
        noise = torch.randn(real.size(0), NZ, 1, 1, device=device)
        fake = netG(noise)
        label.fill_(0)
        errD_fake = criterion(netD(fake.detach()), label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1)
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()
        print("KEPT", epoch, index, (errD_real + errD_fake).item(), errG.item(), flush=True)
    print("KEPT", netG(fixed_noise).detach().cpu().sum().item(), flush=True)
    torch.save(netG.state_dict(), f"{sys.argv[2]}/netG_epoch_{epoch}.pth")
    torch.save(netD.state_dict(), f"{sys.argv[2]}/netD_epoch_{epoch}.pth")
