"""gpytorch's tutorial "Simple GP Regression": an exact Gaussian process, its hyperparameters by Adam, and predictions."""

import math

import gpytorch
import torch
from shared import DEVICE


class ExactGPModel(gpytorch.models.ExactGP):
    def __init__(self, train_x, train_y, likelihood) -> None:
        super().__init__(train_x, train_y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
train_x = torch.linspace(0, 1, 100)
train_y = torch.sin(train_x * (2 * math.pi)) + torch.randn(train_x.size()) * math.sqrt(0.04)
train_x, train_y = train_x.to(DEVICE), train_y.to(DEVICE)
likelihood = gpytorch.likelihoods.GaussianLikelihood().to(DEVICE)
model = ExactGPModel(train_x, train_y, likelihood).to(DEVICE)
model.train()
likelihood.train()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
for _ in range(12):
    optimizer.zero_grad()
    loss = -mll(model(train_x), train_y)
    loss.backward()
    print("KEPT", loss.item(), model.covar_module.base_kernel.lengthscale.item(), flush=True)
    optimizer.step()
model.eval()
likelihood.eval()
with torch.no_grad(), gpytorch.settings.fast_pred_var():
    predicted = likelihood(model(torch.linspace(0, 1, 51, device=DEVICE)))
    lower, upper = predicted.confidence_region()
print("KEPT", predicted.mean.sum().item(), (upper - lower).sum().item(), flush=True)
