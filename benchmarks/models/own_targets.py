"""Models that choose their targets in the step: a codebook, a matching, a teacher."""

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from benchmarks.models.parts import conv
from planner.capture.workload.models import Workload


class _VectorQuantized(nn.Module):
    """An autoencoder whose code is the nearest vectors of a codebook, with gradients straight through the choice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(conv(3, 32, 2), conv(32, 64, 2), nn.Conv2d(64, 16, 1))
        self.codebook = nn.Embedding(64, 16)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(16, 64, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 3, 1)
        )
        self.register_buffer("uses", torch.zeros(64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x).permute(0, 2, 3, 1)
        nearest = torch.cdist(code.flatten(0, 2), self.codebook.weight).argmin(1)
        with torch.no_grad():
            self.uses.mul_(0.99).add_(F.one_hot(nearest, 64).sum(0), alpha=0.01)
        chosen = self.codebook(nearest).view_as(code)
        quantization = F.mse_loss(chosen, code.detach()) + 0.25 * F.mse_loss(code, chosen.detach())
        chosen = code + (chosen - code).detach()
        return F.mse_loss(self.decoder(chosen.permute(0, 3, 1, 2)), x) + quantization, nearest


def vq_vae() -> Workload:
    """Build a model whose codebook is chosen from by the least distance."""
    return Workload(_VectorQuantized(), None, (torch.randn(8, 3, 32, 32),))


class _Detector(nn.Module):
    """Boxes and classes from learned queries, matched to the targets on the host as in DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(conv(3, 32, 2), conv(32, 64, 2), conv(64, 64, 2))
        self.positions = nn.Parameter(torch.randn(64, 64) * 0.1)
        self.queries = nn.Parameter(torch.randn(10, 64))
        self.transformer = nn.Transformer(64, 4, 2, 2, 128, dropout=0.1, batch_first=True)
        self.classes, self.boxes = nn.Linear(64, 6), nn.Linear(64, 4)

    def forward(self, images: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
        features = self.backbone(images).flatten(2).transpose(1, 2) + self.positions
        found = self.transformer(features, self.queries.expand(len(images), -1, -1))
        logits, places = self.classes(found), self.boxes(found).sigmoid()
        queries, targets = self._match(logits, places, labels, boxes)
        wanted = torch.full(logits.shape[:2], 5)  # the last class is "no object"
        wanted.scatter_(1, queries, labels.gather(1, targets))
        near = places.gather(1, queries[..., None].expand(-1, -1, 4)), boxes.gather(1, targets[..., None].expand(-1, -1, 4))
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten()) + 5 * F.l1_loss(*near)

    @torch.no_grad()
    def _match(self, logits: Tensor, places: Tensor, labels: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries and the targets of the pairs of least cost, for each image."""
        chances = logits.softmax(-1).gather(2, labels[:, None].expand(-1, logits.shape[1], -1))
        costs = (5 * torch.cdist(places, boxes, p=1) - chances).cpu()
        pairs = [linear_sum_assignment(cost.numpy()) for cost in costs]
        queries, targets = (torch.stack([torch.as_tensor(pair[side]) for pair in pairs]) for side in (0, 1))
        return queries, targets


def detr() -> Workload:
    """Build a detection model that matches boxes on the host, between two parts of its forward pass."""
    return Workload(_Detector(), None, (torch.randn(4, 3, 64, 64), torch.randint(5, (4, 3)), torch.rand(4, 3, 4)))


class _SelfDistilled(nn.Module):
    """A student that learns from its own average, as DINO: the teacher's outputs are centred.

    The average is updated in the forward pass, as in MoCo; the centre between the passes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = self._network(), self._network()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.register_buffer("centre", torch.zeros(1, 64))

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for mean, weight in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
            seen = self.teacher(torch.cat((first, second)))
            targets = ((seen - self.centre) / 0.04).softmax(-1).chunk(2)
        guesses = [(self.student(view) / 0.1).log_softmax(-1) for view in (second, first)]
        losses = [-(target * guess).sum(-1).mean() for target, guess in zip(targets, guesses, strict=True)]
        return (losses[0] + losses[1]) / 2, seen

    @torch.no_grad()
    def update_between(self, outputs: list[Tensor]) -> None:
        """Update the centre by the teacher's outputs."""
        self.centre.lerp_(outputs[-1].mean(0, keepdim=True), 0.1)

    @staticmethod
    def _network() -> nn.Sequential:
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        return nn.Sequential(conv(3, 32, 2), conv(32, 64), conv(64, 64, 2), *head)


def dino() -> Workload:
    """Build a student with a teacher, whose centre changes between forward and backward pass."""
    return Workload(_SelfDistilled(), None, (torch.randn(16, 3, 32, 32), torch.randn(16, 3, 32, 32)))
