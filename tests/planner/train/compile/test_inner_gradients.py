"""Steps that compute gradients inside: penalties on them, differential equations, forces, inner loops, transforms."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd import grad
from torch.func import functional_call, hessian, jacrev, jvp, vjp, vmap

import planner
from benchmarks.models.parts import FunctionModule
from planner.graphs.errors import PlannerError
from planner.torch_private.capture import GRADIENT_SETTINGS
from tests.support.marks import slow
from tests.support.models.as_eager import check_trains_as_eager

pytestmark = pytest.mark.skipif(not GRADIENT_SETTINGS, reason="this release of PyTorch captures no gradients")


def network(outputs: int = 1, activation: type[nn.Module] = nn.SiLU) -> nn.Sequential:
    widths = (4, 32, 32)
    hidden = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), activation())]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], outputs))


def with_loss(loss: Callable[..., Tensor], net: nn.Module) -> nn.Module:
    """A network and the loss of a step."""
    return FunctionModule(lambda m, x: loss(m.net, x), net=net)


def points(number: int) -> tuple[Tensor]:
    return (torch.randn(96, 4, generator=torch.Generator().manual_seed(number)),)


def penalty(critic: nn.Module, x: Tensor) -> Tensor:
    mixed = torch.autograd.Variable(x + x.flip(0), requires_grad=True)
    scores = critic(mixed)
    (slope,) = grad(scores, mixed, torch.ones_like(scores), create_graph=True, retain_graph=True, only_inputs=True)
    return critic(x).mean() + 10 * (slope.norm(2, dim=1) - 1).square().mean()


def penalty_at_the_end(critic: nn.Module, x: Tensor) -> Tensor:
    loss = F.softplus(critic(x)).mean() + F.softplus(-critic(x.flip(0))).mean()
    real = x.detach().requires_grad_()  # a break here would add the gradients of each part first
    (slope,) = grad([critic(real).sum()], [real], create_graph=True)
    return loss + slope.square().sum(1).mean()


def equation(solution: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    u = solution(x)
    (first,) = grad(u, x, torch.ones_like(u), create_graph=True)
    (second,) = grad(first[:, 0].sum(), x, create_graph=True)
    return (first[:, 1] + u[:, 0] * first[:, 0] - second[:, 0]).square().mean()


def forces(energy: nn.Module, x: Tensor) -> Tensor:
    places = x.clone().requires_grad_(True)
    total = energy((-(places[:, None] - places).square()).exp().sum(1)).sum()
    return grad(total, places, create_graph=True)[0].square().mean()


def divergence(score: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    found = score(x)
    traces = [grad(found[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(4)]
    return (found.square().sum(1) / 2 + sum(traces)).mean()


def curvature(net: nn.Module, x: Tensor) -> Tensor:
    slopes = grad(net(x).square().mean(), net.parameters(), create_graph=True)
    found = grad((slope.sum() for slope in slopes), filter(lambda w: w.ndim > 1, net.parameters()), create_graph=True)
    return sum(each.square().mean() for each in found)


def adversarial(net: nn.Module, x: Tensor) -> Tensor:
    moved = x.clone().requires_grad_(True)
    (slope,) = grad(net(moved).square().sum(), moved)
    return net(x + 0.1 * slope.sign()).square().mean()


def unused(net: nn.Module, x: Tensor) -> Tensor:
    used, other = x.clone().requires_grad_(True), torch.zeros(4, requires_grad=True)
    found = net(used)
    slope, none = grad(inputs=(t for t in (used, other)), outputs=found.sum(), create_graph=True, allow_unused=True)
    assert none is None
    return slope.square().mean() + found.mean()


def inner_loop(net: nn.Module, x: Tensor) -> Tensor:
    weights = dict(net.named_parameters())
    for _ in range(2):
        loss = functional_call(net, weights, (x,)).square().mean()
        slopes = grad(loss, weights.values(), create_graph=True)
        weights = {name: w - 0.1 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
    return F.softplus(functional_call(net, weights, (x,))).mean()


def several(net: nn.Module, x: Tensor) -> Tensor:
    return unused(net, x) + inner_loop(net, x)


ALONE = (penalty, equation, forces, divergence, curvature, adversarial, unused, inner_loop)
LOSSES: list[Any] = [several, *slow(*ALONE)]


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_inside_the_step_train_as_in_eager_mode(loss: Callable[..., Tensor]) -> None:
    check_trains_as_eager(lambda: with_loss(loss, network(4 if loss is divergence else 1)), None, points)


TRANSFORMED: list[Callable[..., Tensor]] = [
    lambda net, x: vmap(torch.func.grad(lambda row: net(row).sum()))(x).square().mean(),
    lambda net, x: vmap(jacrev(net))(x).square().mean(),
    lambda net, x: vmap(hessian(lambda row: net(row).sum()))(x).square().mean(),
    lambda net, x: jvp(net, (x,), (x,))[1].square().mean(),
    lambda net, x: vjp(net, x)[1](x[:, :1])[0].square().mean(),
]


def several_transforms(net: nn.Module, x: Tensor) -> Tensor:
    slopes = vmap(torch.func.grad(lambda row: net(row).sum()))(x)
    return slopes.square().mean() + jvp(net, (x,), (x,))[1].square().mean() + vjp(net, x)[1](x[:, :1])[0].square().mean()


@pytest.mark.parametrize("loss", [several_transforms, *slow(*TRANSFORMED)])
def test_transforms_inside_the_step_train_as_in_eager_mode(loss: Callable[..., Tensor]) -> None:
    check_trains_as_eager(lambda: with_loss(loss, network(activation=nn.Tanh)), None, points)


def by_backend(model: nn.Module, budget: str) -> Any:
    return torch.compile(model, backend="planner", options={"budget": budget, "wait": 0})


def by_checkpoint(model: nn.Module, budget: str) -> Any:
    return planner.checkpoint(model, budget=budget, wait=0)


# The same code plans for both: each test tries one, and the weekly run the other.
EITHER = [by_backend, *slow(by_checkpoint)]


@pytest.mark.parametrize("loss", [penalty, penalty_at_the_end, unused, *slow(equation)])
@pytest.mark.parametrize("planned", EITHER)
def test_gradients_inside_the_model_train_as_in_eager_mode(
    planned: Callable[[nn.Module, str], Any], loss: Callable[..., Tensor]
) -> None:
    trained = []
    counters.clear()
    for wrap in (planned, lambda model, _: model):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = with_loss(loss, network())
        run = wrap(model, "80%")
        found = []
        for number in range(2):
            run(*points(number)).backward()
            found += [weight.grad for weight in model.parameters()]
            torch.optim.SGD(model.parameters(), 0.1).step()
            model.zero_grad()
        trained.append(found)
    assert all(gradient is not None and torch.equal(gradient, wanted) for gradient, wanted in zip(*trained, strict=True))
    assert not counters["graph_break"]


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradients[0]


def of_cubes(net: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    return grad(Cubed.apply(net(x)).sum(), x, create_graph=True)[0].square().mean()


@pytest.mark.filterwarnings("ignore:the model is captured as several graphs")
@pytest.mark.parametrize("planned", [lambda model, budget: planner.compile(model, None, points(0), budget=budget), *EITHER])
def test_gradients_of_gradients_of_a_custom_function_raise(planned: Callable[[nn.Module, str], Any]) -> None:
    torch._dynamo.reset()
    with pytest.raises(PlannerError, match=r"a custom autograd function computes|gradients of a model that runs by its plan"):
        planned(with_loss(of_cubes, network()), "100%")(*points(0)).backward()


@pytest.mark.filterwarnings("ignore:the gradient of what .* is laid out otherwise")  # an expanded one, of the sum
@pytest.mark.parametrize("planned", EITHER)
def test_gradients_of_the_gradients_of_a_planned_model_raise(planned: Callable[[nn.Module, str], Any]) -> None:
    torch._dynamo.reset()
    critic = network()
    run = planned(critic, "100%")
    x = points(0)[0].requires_grad_(True)
    (slope,) = grad(run(x).sum(), x, create_graph=True)
    assert torch.equal(slope, grad(network_of(critic)(x).sum(), x)[0])
    with pytest.raises(PlannerError, match=r"planner\.rematerialize"):
        slope.square().mean().backward()


def network_of(critic: nn.Module) -> nn.Module:
    """Return an unplanned network with the same weights."""
    copy = network()
    copy.load_state_dict(critic.state_dict())
    return copy


class Critic(nn.Module):
    """A model with a penalty on the gradient of its input, which `follow` makes require a gradient."""

    def __init__(self, follow: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.follow = follow

    def forward(self, x: Tensor) -> Tensor:
        x = self.follow(x)
        score = self.layers(x)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score + gradient.square().sum(1, keepdim=True)


def by_attribute(x: Tensor) -> Tensor:
    x.requires_grad = True
    return x


def own_tensor(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


@pytest.mark.parametrize("follow", [lambda x: x.requires_grad_(True), by_attribute])
def test_a_tensor_of_the_batch_that_the_step_lets_require_a_gradient(follow: Callable[[Tensor], Tensor]) -> None:
    x, y, model = torch.randn(16, 8), torch.randn(16, 1), Critic(follow)
    twin = copy.deepcopy(model)
    with pytest.warns(
        UserWarning, match=r"makes a tensor of the batch require a gradient.* call requires_grad_\(\) on the batch"
    ):
        step = planner.compile(model, F.mse_loss, (x, y), budget="100%")
    for _ in range(2):
        step(x, y).backward()
    assert not x.requires_grad and x.grad is None
    given = x.clone()
    for _ in range(2):
        F.mse_loss(twin(given), y).backward()  # eager PyTorch leaves a gradient in the batch
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    for mended, batch in ((model, given.detach().clone().requires_grad_()), (Critic(own_tensor), x)):
        mended.load_state_dict(model.state_dict())
        other = planner.compile(mended, F.mse_loss, (batch, y), budget="100%")
        mended.zero_grad()
        for _ in range(2):
            other(batch, y).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(mended.parameters(), twin.parameters(), strict=True))
        assert batch.grad is None or torch.equal(batch.grad, given.grad)
        assert batch.requires_grad is (batch.grad is not None)


class Points(nn.Module):
    """A network on fixed points, of which eager PyTorch makes leaves in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.inner = torch.rand(16, 2)
        self.border: Tensor
        self.register_buffer("border", torch.rand(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layers(x).square().mean()
        for points in (self.inner.requires_grad_(), self.border.requires_grad_()):
            (slope,) = torch.autograd.grad(self.layers(points).sum(), points, create_graph=True)
            loss = loss + slope.square().mean()
        return loss


@pytest.mark.filterwarnings("ignore:.*makes a tensor that is no parameter require a gradient")
@pytest.mark.parametrize("runs_before", [False, True])
def test_fixed_points_that_the_step_lets_require_a_gradient(runs_before: bool) -> None:
    x, model = torch.rand(16, 2), Points()
    twin = copy.deepcopy(model)
    if runs_before:
        model(x)
    step = planner.compile(model, None, (x,), budget="100%")
    for run, one in ((step, model), (twin, twin), (model, model), (twin, twin), (step, model), (twin, twin)):
        loss = run(x)
        loss.backward()
        with torch.no_grad():
            for parameter in one.parameters():
                parameter -= 0.1 * parameter.grad
        one.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
