"""pytorch/examples siamese_network/main.py: a ResNet18 on pairs of digits, binary cross entropy, Adadelta: `siamese_example.py DATA OUT`."""

import sys

import torch
import torchvision
from digits import digits
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.resnet = torchvision.models.resnet18(weights=None)
        self.resnet.conv1 = nn.Conv2d(1, 64, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), bias=False)
        features = self.resnet.fc.in_features
        self.resnet = nn.Sequential(*list(self.resnet.children())[:-1])
        self.fc = nn.Sequential(nn.Linear(features * 2, 256), nn.ReLU(inplace=True), nn.Linear(256, 1))
        self.sigmoid = nn.Sigmoid()
        self.resnet.apply(self.init_weights)
        self.fc.apply(self.init_weights)

    def init_weights(self, module):
        if isinstance(module, nn.Linear):
            torch.nn.init.xavier_uniform_(module.weight)
            module.bias.data.fill_(0.01)

    def forward_once(self, x):
        output = self.resnet(x)
        return output.view(output.size()[0], -1)

    def forward(self, input1, input2):
        return self.sigmoid(self.fc(torch.cat((self.forward_once(input1), self.forward_once(input2)), 1)))


class Pairs(Dataset):
    """The first of a pair is given; the second is of the same digit or of another, by turns."""

    def __init__(self, images, labels):
        self.images, self.labels = images[:, None] / 255, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        same = index % 2 == 0
        like = (self.labels == self.labels[index]) == same
        others = like.nonzero().flatten()
        other = others[torch.randint(len(others), ())]
        return self.images[index], self.images[other], torch.tensor(float(same))


torch.manual_seed(1)
on_gpu = torch.accelerator.is_available()
device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
more = {"num_workers": 1, "pin_memory": True}  # the example has them on a GPU only; they draw the pairs
images, labels = digits(sys.argv[1], 80)
train_loader = DataLoader(Pairs(images[:40], labels[:40]), batch_size=8, shuffle=True, **more)
test_loader = DataLoader(Pairs(images[40:], labels[40:]), batch_size=20, **more)
model = SiameseNetwork().to(device)
optimizer = optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
criterion = nn.BCELoss()
for epoch in (1, 2):
    model.train()
    for first, second, targets in train_loader:
        first, second, targets = first.to(device), second.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = criterion(model(first, second).squeeze(), targets)
        loss.backward()
        optimizer.step()
        print("KEPT", epoch, loss.item(), flush=True)
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for first, second, targets in test_loader:
            first, second, targets = first.to(device), second.to(device), targets.to(device)
            outputs = model(first, second).squeeze()
            test_loss += criterion(outputs, targets).sum().item()
            pred = torch.where(outputs > 0.5, 1, 0)
            correct += pred.eq(targets.view_as(pred)).sum().item()
    print("KEPT", epoch, test_loss, correct, flush=True)
    scheduler.step()
torch.save(model.state_dict(), sys.argv[2] + "/siamese_network.pt")
