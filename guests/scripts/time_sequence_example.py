"""pytorch/examples time_sequence_prediction/train.py: two LSTMCells in double precision, trained by LBFGS, which evaluates a closure several times a step."""

import math

import torch
from shared import DEVICE
from torch import nn, optim


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 51)
        self.lstm2 = nn.LSTMCell(51, 51)
        self.linear = nn.Linear(51, 1)

    def forward(self, given, future=0):
        outputs = []
        h_t, c_t, h_t2, c_t2 = (
            torch.zeros(given.size(0), 51, dtype=torch.double, device=given.device) for _ in range(4)
        )
        for input_t in given.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


torch.manual_seed(0)
phases = torch.randint(-80, 80, (12, 1))
data = torch.sin((torch.arange(40) + phases) / 20.0 * math.pi).double()
given, target = data[3:, :-1].to(DEVICE), data[3:, 1:].to(DEVICE)
test_input, test_target = data[:3, :-1].to(DEVICE), data[:3, 1:].to(DEVICE)
seq = Sequence().double().to(DEVICE)
criterion = nn.MSELoss()
optimizer = optim.LBFGS(seq.parameters(), lr=0.8)
for _ in range(3):

    def closure():
        optimizer.zero_grad()
        loss = criterion(seq(given), target)
        print("KEPT", loss.item(), flush=True)
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        pred = seq(test_input, future=10)
        loss = criterion(pred[:, :-10], test_target)
        print("KEPT", loss.item(), pred.detach().cpu().sum().item(), flush=True)
