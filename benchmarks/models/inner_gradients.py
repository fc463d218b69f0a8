"""Models whose step computes gradients inside: a penalty on them, a differential equation, forces."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

from benchmarks.models.parts import FunctionModule
from planner.capture.workload.models import Workload


def _network(inputs: int, outputs: int, activation: type[nn.Module]) -> nn.Sequential:
    hidden = [layer for _ in range(4) for layer in (nn.Linear(64, 64), activation())]
    return nn.Sequential(nn.Linear(inputs, 64), activation(), *hidden, nn.Linear(64, outputs))


def wgan_gp() -> Workload:
    """Return the critic of a Wasserstein GAN, whose loss has the norm of its gradient by the input."""

    def forward(m: Any, real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
        mixed = (share * real + (1 - share) * fake).requires_grad_(True)
        (slope,) = grad(m.scores(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.flatten(1).norm(2, dim=1) - 1).square().mean()
        loss: Tensor = m.scores(fake).mean() - m.scores(real).mean() + 10 * penalty
        return loss

    scores = nn.Sequential(
        nn.Conv2d(3, 32, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, stride=2, padding=1),
        nn.GroupNorm(8, 64),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 1),
    )
    batch = torch.randn(16, 3, 32, 32), torch.randn(16, 3, 32, 32), torch.rand(16, 1, 1, 1)
    return Workload(FunctionModule(forward, scores=scores), None, batch)


def pinn() -> Workload:
    """Return a physics-informed network for Burgers' equation, whose residual has second derivatives."""

    def forward(m: Any, places: Tensor) -> Tensor:
        places = places.clone().requires_grad_(True)
        u = m.solution(places)
        (first,) = grad(u, places, torch.ones_like(u), create_graph=True)
        (second,) = grad(first[:, 0].sum(), places, create_graph=True)
        residual = first[:, 1] + u[:, 0] * first[:, 0] - 0.01 * second[:, 0]
        loss: Tensor = residual.square().mean() + F.mse_loss(u[:32], -torch.sin(torch.pi * places[:32, :1]))
        return loss

    return Workload(FunctionModule(forward, solution=_network(2, 1, nn.Tanh)), None, (torch.rand(512, 2),))


def force_field() -> Workload:
    """Return energies of molecules from the distances of their atoms, trained on forces, which are their gradients."""

    def forward(m: Any, places: Tensor, forces: Tensor) -> Tensor:
        places = places.clone().requires_grad_(True)
        distances = (places[:, :, None] - places[:, None]).square().sum(-1, keepdim=True)
        energy = m.energies((-distances).exp()).sum((1, 2, 3))
        (slope,) = grad(energy.sum(), places, create_graph=True)
        loss: Tensor = F.mse_loss(-slope, forces) + 1e-4 * energy.square().mean()
        return loss

    model = FunctionModule(forward, energies=_network(1, 1, nn.SiLU))
    return Workload(model, None, (torch.randn(8, 12, 3), torch.randn(8, 12, 3)))
