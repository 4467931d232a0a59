"""pytorch/examples mnist_forward_forward/main.py: each layer is trained by itself, with an optimizer of its own: `forward_forward_example.py DATA`."""

import sys
from itertools import pairwise

import torch
from digits import digits
from torch import nn
from torch.optim import Adam

EPOCHS = 6


def get_y_neg(y):
    y_neg = y.clone()
    for idx, y_samp in enumerate(y):
        allowed_indices = list(range(10))
        allowed_indices.remove(y_samp.item())
        y_neg[idx] = torch.tensor(allowed_indices)[torch.randint(len(allowed_indices), size=(1,))].item()
    return y_neg.to(device)


def overlay_y_on_x(x, y, classes=10):
    x_ = x.clone()
    x_[:, :classes] *= 0.0
    x_[range(x.shape[0]), y] = x.max()
    return x_


class Net(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.layers = [Layer(before, after).to(device) for before, after in pairwise(dims)]

    def predict(self, x):
        goodness_per_label = []
        for label in range(10):
            h, goodness = overlay_y_on_x(x, label), []
            for layer in self.layers:
                h = layer(h)
                goodness += [h.pow(2).mean(1)]
            goodness_per_label += [sum(goodness).unsqueeze(1)]
        return torch.cat(goodness_per_label, 1).argmax(1)

    def train(self, x_pos, x_neg):
        h_pos, h_neg = x_pos, x_neg
        for number, layer in enumerate(self.layers):
            h_pos, h_neg = layer.train(h_pos, h_neg, number)


class Layer(nn.Linear):
    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.relu = torch.nn.ReLU()
        self.opt = Adam(self.parameters(), lr=0.03)
        self.threshold = 2

    def forward(self, x):
        x_direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return self.relu(torch.mm(x_direction, self.weight.T) + self.bias.unsqueeze(0))

    def train(self, x_pos, x_neg, number):
        for epoch in range(EPOCHS):
            g_pos, g_neg = self.forward(x_pos).pow(2).mean(1), self.forward(x_neg).pow(2).mean(1)
            both = torch.cat([-g_pos + self.threshold, g_neg - self.threshold])
            loss = torch.log(1 + torch.exp(both)).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            print("KEPT", number, epoch, loss.item(), flush=True)
        return self.forward(x_pos).detach(), self.forward(x_neg).detach()


torch.manual_seed(1)
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
images, labels = digits(sys.argv[1], 160)
flat = (images.flatten(1) / 255 - 0.1307) / 0.3081
net = Net([784, 100, 100])
x, y = flat[:100].to(device), labels[:100].to(device)
x_te, y_te = flat[100:].to(device), labels[100:].to(device)
net.train(overlay_y_on_x(x, y), overlay_y_on_x(x, get_y_neg(y)))
print("KEPT train error", 1.0 - net.predict(x).eq(y).float().mean().item(), flush=True)
print("KEPT test error", 1.0 - net.predict(x_te).eq(y_te).float().mean().item(), flush=True)
