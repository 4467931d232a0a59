"""pytorch/examples word_language_model/main.py with its defaults, `--model LSTM`: parameters are moved by `p.data.add_`.

`word_language_example.py DATA OUT`, on WikiText-2 as there.  The example seeds once; this one before each step, so that
a device's dropout is the CPU's.
"""

import math
import sys
from pathlib import Path

import torch
from torch import nn

BPTT, BATCH = 12, 8
FILE = Path(sys.argv[2], "model.pt")


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp=32, nhid=32, nlayers=2, dropout=0.2):
        super().__init__()
        self.ntoken, self.nhid, self.nlayers = ntoken, nhid, nlayers
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, inputs, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(inputs)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.ntoken)
        return nn.functional.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, size):
        weight = next(self.parameters())
        return weight.new_zeros(self.nlayers, size, self.nhid), weight.new_zeros(
            self.nlayers, size, self.nhid
        )


def repackage_hidden(hidden):
    return tuple(one.detach() for one in hidden)


def batchify(tokens, size):
    rows = tokens.size(0) // size
    return tokens[: rows * size].view(size, -1).t().contiguous().to(device)


def get_batch(source, at):
    length = min(BPTT, len(source) - 1 - at)
    return source[at : at + length], source[at + 1 : at + 1 + length].view(-1)


def train(lr, epoch):
    model.train()
    hidden = model.init_hidden(BATCH)
    for at in range(0, train_data.size(0) - 1, BPTT):
        torch.manual_seed(1000 * epoch + at)
        data, targets = get_batch(train_data, at)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        print("KEPT", epoch, at, loss.item(), flush=True)


def evaluate(source):
    model.eval()
    total, hidden = 0.0, model.init_hidden(BATCH)
    with torch.no_grad():
        for at in range(0, source.size(0) - 1, BPTT):
            data, targets = get_batch(source, at)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total += len(data) * criterion(output, targets).item()
    return total / (len(source) - 1)


torch.manual_seed(1111)
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
words = (Path(sys.argv[1]) / "wikitext-2" / "valid.txt").read_text().replace("\n", " <eos> ").split()[:800]
number = {word: index for index, word in enumerate(dict.fromkeys(words))}
tokens = torch.tensor([number[word] for word in words])
train_data, val_data = batchify(tokens[:500], BATCH), batchify(tokens[500:], BATCH)
model = RNNModel(len(number)).to(device)
criterion = nn.NLLLoss()
lr, best = 20.0, None
for epoch in (1, 2):
    train(lr, epoch)
    val_loss = evaluate(val_data)
    print("KEPT", epoch, val_loss, math.exp(min(val_loss, 50)), flush=True)
    if best is None or val_loss < best:
        torch.save(model, FILE)
        best = val_loss
    else:
        lr /= 4.0
model.guest_result = True
trained = model
model = torch.load(FILE, weights_only=False)
model.rnn.flatten_parameters()
print("KEPT", evaluate(val_data), flush=True)
