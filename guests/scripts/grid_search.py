"""skorch after its README: a classifier in scikit-learn's GridSearchCV, which trains and scores many."""

import numpy
import torch
from shared import DEVICE
from sklearn.datasets import make_classification
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetClassifier
from torch import nn


class MyModule(nn.Module):
    def __init__(self, num_units: int = 10, nonlin=nn.ReLU()) -> None:
        super().__init__()
        self.dense0, self.nonlin = nn.Linear(20, num_units), nonlin
        self.dense1, self.output = nn.Linear(num_units, num_units), nn.Linear(num_units, 2)

    def forward(self, X, **kwargs):
        X = self.nonlin(self.dense0(X))
        X = self.nonlin(self.dense1(X))
        return torch.softmax(self.output(X), dim=-1)


torch.manual_seed(0)
X, y = make_classification(120, 20, n_informative=10, random_state=0)
X, y = X.astype(numpy.float32), y.astype(numpy.int64)
net = NeuralNetClassifier(
    MyModule, criterion=nn.CrossEntropyLoss, max_epochs=2, lr=0.1, iterator_train__shuffle=True, device=DEVICE,
    train_split=False, verbose=0,
)  # fmt: skip
search = GridSearchCV(
    net, {"lr": [0.01, 0.1], "module__num_units": [8, 16]}, refit=True, cv=2, scoring="accuracy"
)
search.fit(X, y)
print(
    "KEPT",
    search.best_score_,
    search.best_params_,
    search.cv_results_["mean_test_score"].tolist(),
    flush=True,
)
print("KEPT", float(search.predict_proba(X).std()), flush=True)
