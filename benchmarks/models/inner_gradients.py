"""Models whose step computes gradients inside: a penalty on them, a differential equation, forces."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

from planner.capture.workload.models import Workload


def _network(inputs: int, outputs: int, activation: type[nn.Module]) -> nn.Sequential:
    hidden = [layer for _ in range(4) for layer in (nn.Linear(64, 64), activation())]
    return nn.Sequential(nn.Linear(inputs, 64), activation(), *hidden, nn.Linear(64, outputs))


class _Critic(nn.Module):
    """The critic of a Wasserstein GAN with its gradient penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Sequential(
            nn.Conv2d(3, 32, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(32, 64, 4, stride=2, padding=1),
            nn.GroupNorm(8, 64),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(64 * 8 * 8, 1),
        )

    def forward(self, real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
        mixed = (share * real + (1 - share) * fake).requires_grad_(True)
        (slope,) = grad(self.scores(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.flatten(1).norm(2, dim=1) - 1).square().mean()
        loss: Tensor = self.scores(fake).mean() - self.scores(real).mean() + 10 * penalty
        return loss


def wgan_gp() -> Workload:
    """Return the critic of a Wasserstein GAN, whose loss has the norm of its gradient by the input."""
    return Workload(_Critic(), None, (torch.randn(16, 3, 32, 32), torch.randn(16, 3, 32, 32), torch.rand(16, 1, 1, 1)))


class _Burgers(nn.Module):
    """The residual of Burgers' equation, with second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.solution = _network(2, 1, nn.Tanh)

    def forward(self, places: Tensor) -> Tensor:
        places = places.clone().requires_grad_(True)
        u = self.solution(places)
        (first,) = grad(u, places, torch.ones_like(u), create_graph=True)
        (second,) = grad(first[:, 0].sum(), places, create_graph=True)
        residual = first[:, 1] + u[:, 0] * first[:, 0] - 0.01 * second[:, 0]
        loss: Tensor = residual.square().mean() + F.mse_loss(u[:32], -torch.sin(torch.pi * places[:32, :1]))
        return loss


def pinn() -> Workload:
    """Return a physics-informed network for Burgers' equation."""
    return Workload(_Burgers(), None, (torch.rand(512, 2),))


class _ForceField(nn.Module):
    """Energies of molecules from the distances of their atoms, and forces as their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.energies = _network(1, 1, nn.SiLU)

    def forward(self, places: Tensor, forces: Tensor) -> Tensor:
        places = places.clone().requires_grad_(True)
        distances = (places[:, :, None] - places[:, None]).square().sum(-1, keepdim=True)
        energy = self.energies((-distances).exp()).sum((1, 2, 3))
        (slope,) = grad(energy.sum(), places, create_graph=True)
        loss: Tensor = F.mse_loss(-slope, forces) + 1e-4 * energy.square().mean()
        return loss


def force_field() -> Workload:
    """Return a force field, trained on forces."""
    return Workload(_ForceField(), None, (torch.randn(8, 12, 3), torch.randn(8, 12, 3)))
