"""Derivatives forwards, and of derivatives: what has no tangent is left out; adding its zero loses a sign."""

import torch
from odd_program import begin, device, say
from torch.autograd import forward_ad

begin()
weight = torch.nn.Parameter(torch.linspace(-1, 1, 6, device=device))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(1, 9):
    point = weight.detach()
    say(step, torch.func.hessian(lambda x: (x**3).sum())(point))
    say(step, *torch.func.jvp(lambda x: x.exp() * x, (point,), (torch.ones_like(point),)))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(point, torch.eye(6, device=device)[step % 6])
        tangent = forward_ad.unpack_dual(torch.ones_like(point) * dual**2).tangent
        say(step, tangent, forward_ad.unpack_dual(dual.clone() - point).tangent)
    zero = torch._efficientzerotensor((6,), device=device)
    say(step, zero * point + point, zero.clone(), (zero + point).sum().item())
    optimizer.zero_grad()
    (weight**2).sum().backward()
    optimizer.step()
    say(step, weight)
