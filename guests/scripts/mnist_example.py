"""pytorch/examples mnist/main.py: Adadelta, dropout, workers and pinned memory on a GPU, StepLR: `mnist_example.py DATA OUT`.

The example seeds once; this one before each step and epoch, so that a device's dropout is the CPU's.
"""

import sys

import torch
import torch.nn.functional as F
from digits import digits
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def train(model, loader, optimizer, epoch):
    model.train()
    for index, (data, target) in enumerate(loader):
        torch.manual_seed(1000 * epoch + index)
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        print("KEPT", epoch, index, loss.item(), flush=True)


def test(model, loader):
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    print("KEPT", test_loss / len(loader.dataset), correct, flush=True)


torch.manual_seed(1)
on_gpu = torch.accelerator.is_available()
device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
more = {
    "num_workers": 1,
    "persistent_workers": True,
    "pin_memory": True,
}  # on a GPU only there; they shuffle otherwise
images, labels = digits(sys.argv[1], 160)
pictures = TensorDataset((images[:, None] / 255 - 0.1307) / 0.3081, labels)
train_loader = DataLoader(torch.utils.data.Subset(pictures, range(96)), batch_size=16, shuffle=True, **more)
test_loader = DataLoader(torch.utils.data.Subset(pictures, range(96, 160)), batch_size=32, **more)
model = Net().to(device)
optimizer = optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
for epoch in (1, 2):
    torch.manual_seed(epoch)
    train(model, train_loader, optimizer, epoch)
    test(model, test_loader)
    scheduler.step()
torch.save(model.state_dict(), sys.argv[2] + "/mnist_cnn.pt")
