"""The zoo: real-size parameter counts, tiny training runs, options."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from planner.capture.workload.models import ZOO, Workload, build
from planner.capture.workload.models.llama import compute_rotary_tables, rotate
from planner.graphs.errors import PlannerError, UsageError
from tests.support.marks import slow_among

TINY: dict[str, dict[str, Any]] = {
    "gpt2": {"batch": 2, "seq": 8, "layers": 2, "width": 16, "heads": 2, "vocab": 32},
    "llama": {"batch": 2, "seq": 8, "layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "hidden": 24, "vocab": 32},
    "vit": {"batch": 2, "size": 16, "patch": 8, "layers": 2, "width": 16, "heads": 2, "classes": 4},
    "resnet18": {"batch": 4, "size": 32, "width": 4, "classes": 4},
    "resnet50": {"batch": 4, "size": 32, "width": 4, "classes": 4},
    "resnet152": {"batch": 4, "size": 32, "width": 8, "classes": 4},
    "vgg16": {"batch": 2, "size": 32, "width": 8, "hidden": 64, "classes": 4, "bn": True},
    "vgg19": {"batch": 2, "size": 32, "width": 8, "hidden": 64, "classes": 4},
    "unet": {"batch": 2, "size": 16, "channels": 8, "depth": 2, "classes": 3},
    "mobilenet_v2": {"batch": 4, "size": 64, "multiplier": 0.25, "classes": 4},
    "densenet121": {"batch": 4, "size": 32, "blocks": (2, 2), "growth": 4, "classes": 4},
    "mlp": {"batch": 4, "layers": 2, "width": 8, "classes": 4},
}

# From the models' own papers, model cards and torchvision's tables; U-Net with BatchNorm and transposed convolutions.
PARAMETERS = {
    "gpt2": 124_439_808,
    "llama": 6_738_415_616,
    "vit": 86_567_656,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "unet": 31_037_698,
    "mobilenet_v2": 3_504_872,
    "densenet121": 7_978_856,
}


pytestmark = pytest.mark.usefixtures("one_thread")  # tiny tensors take longer to share out than to compute


def parameters(name: str, **options: Any) -> int:
    with FakeTensorMode():
        return sum(p.numel() for p in build(name, **options).model.parameters())


def loss_of(workload: Workload) -> Tensor:
    *inputs, target = workload.batch
    return workload.loss_fn(workload.model(*inputs), target)


def train(workload: Workload, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = loss_of(workload)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_every_model_has_a_tiny_version() -> None:
    assert TINY.keys() == ZOO.keys()


@pytest.mark.parametrize("name", slow_among(PARAMETERS, "resnet152", "densenet121"))
def test_parameters_are_the_published_number(name: str) -> None:
    assert parameters(name) == PARAMETERS[name]


def test_variants_have_the_published_number_of_parameters() -> None:
    assert parameters("gpt2", layers=24, width=1024, heads=16) == 354_823_168
    assert parameters("vit", layers=24, width=1024, heads=16) == 304_326_632
    assert parameters("resnet18", blocks=(3, 4, 6, 3)) == 21_797_672
    assert parameters("resnet50", blocks=(3, 4, 23, 3)) == 44_549_160
    assert parameters("vgg16", bn=True) == 138_365_992
    assert parameters("densenet121", blocks=(6, 12, 32, 32)) == 14_149_480
    # Llama 3 8B: grouped queries, wider feed-forward nets, larger vocabulary.
    assert parameters("llama", kv_heads=8, hidden=14336, vocab=128256) == 8_030_261_248


def test_mlp_has_a_matrix_and_a_bias_per_layer() -> None:
    assert parameters("mlp", layers=3, width=10, classes=4) == 3 * (10 * 10 + 10) + 10 * 4 + 4


@pytest.mark.parametrize("name", TINY)
def test_training_has_finite_changing_losses_and_all_gradients(name: str) -> None:
    torch.manual_seed(0)
    workload = build(name, **TINY[name], **({} if "dtype" in TINY[name] else {"dtype": "float32"}))
    losses = train(workload, 4)
    assert all(torch.tensor(losses).isfinite())
    assert len(set(losses)) == 4
    assert min(losses[1:]) < losses[0]
    for key, parameter in workload.model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", TINY)
def test_dtype_of_everything_but_the_loss(name: str, dtype: str) -> None:
    torch.manual_seed(0)
    workload = build(name, **TINY[name], dtype=dtype)
    wanted = getattr(torch, dtype)
    tensors = [*workload.model.parameters(), *workload.model.buffers(), *workload.batch]
    assert {t.dtype for t in tensors if t.is_floating_point()} == {wanted}
    output = workload.model(*workload.batch[:-1])
    assert output.dtype == wanted
    loss = loss_of(workload)
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", TINY)
def test_seed_decides_everything(name: str) -> None:
    def made(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        workload = build(name, **TINY[name], dtype="float32")
        return [*workload.model.parameters(), *workload.batch, loss_of(workload).detach()]

    first, again, other = made(1), made(1), made(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[-1], other[-1])


def test_batch_options_shape_the_batch() -> None:
    with FakeTensorMode():
        assert [tuple(t.shape) for t in build("gpt2", batch=3, seq=5, layers=1).batch] == [(3, 5), (3, 5)]
        assert [tuple(t.shape) for t in build("resnet50", batch=3, size=64).batch] == [(3, 3, 64, 64), (3,)]
        assert [tuple(t.shape) for t in build("unet", batch=3, size=64).batch] == [(3, 3, 64, 64), (3, 64, 64)]


def test_written_attention_equals_the_fused_one() -> None:
    torch.manual_seed(0)
    fused = build("gpt2", **TINY["gpt2"], dropout=0.0)
    written = build("gpt2", **TINY["gpt2"], dropout=0.0, attention="written")
    written.model.load_state_dict(fused.model.state_dict())
    loss, same = loss_of(fused), loss_of(Workload(written.model, written.loss_fn, fused.batch))
    torch.testing.assert_close(same, loss)
    loss.backward()
    same.backward()
    for a, b in zip(fused.model.parameters(), written.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("attention", ["sdpa", "written"])
def test_gpt2_is_causal(attention: str) -> None:
    torch.manual_seed(0)
    model = build("gpt2", **TINY["gpt2"], dropout=0.0, attention=attention).model
    tokens = torch.randint(32, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 32
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_dropout_is_on_by_default_and_can_be_off() -> None:
    torch.manual_seed(0)
    on, off = build("gpt2", **TINY["gpt2"]), build("gpt2", **TINY["gpt2"], dropout=0.0)
    assert loss_of(on) != loss_of(on)
    assert loss_of(off) == loss_of(off)


def test_embeddings_are_tied_by_default() -> None:
    tied, untied = build("gpt2", **TINY["gpt2"]).model, build("gpt2", **TINY["gpt2"], tie=False).model
    assert tied.get_submodule("head").weight is tied.get_submodule("tokens").weight
    assert untied.get_submodule("head").weight is not untied.get_submodule("tokens").weight


def test_rotary_scores_depend_on_distance_only() -> None:
    torch.manual_seed(0)
    cos, sin = compute_rotary_tables(16, 8, 10000.0)
    q, k = torch.randn(8), torch.randn(8)
    turned_q, turned_k = rotate(q.expand(1, 1, 16, 8), cos, sin)[0, 0], rotate(k.expand(1, 1, 16, 8), cos, sin)[0, 0]
    torch.testing.assert_close(turned_q[3] @ turned_k[1], turned_q[12] @ turned_k[10])
    torch.testing.assert_close(turned_q[0] @ turned_k[0], q @ k)
    assert not torch.allclose(turned_q[3] @ turned_k[1], q @ k)


def test_grouped_queries_with_equal_heads_are_plain_attention() -> None:
    """Key and value heads repeated by hand give what grouping gives."""
    options = {**TINY["llama"], "dtype": "float32"}
    torch.manual_seed(0)
    grouped = build("llama", **options)
    plain = build("llama", **{**options, "kv_heads": 4})
    state = grouped.model.state_dict()
    for key, value in state.items():
        if key.endswith(("attention.k.weight", "attention.v.weight")):
            state[key] = value.view(2, 4, -1).repeat_interleave(2, 0).reshape(16, -1)
    plain.model.load_state_dict(state)
    torch.testing.assert_close(loss_of(Workload(plain.model, plain.loss_fn, grouped.batch)), loss_of(grouped))


def test_unet_supports_group_norm() -> None:
    kinds = {type(m) for m in build("unet", **TINY["unet"], norm="group").model.modules()}
    assert nn.GroupNorm in kinds
    assert nn.BatchNorm2d not in kinds


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt3", {}, "unknown zoo model 'gpt3' (did you mean gpt2?): choose from gpt2, llama, vit, "),
        ("gpt2", {"size": 3}, "gpt2 has no option 'size': its options are batch=8, seq=1024, layers=12, "),
        ("gpt2", {"layers": 0}, "option layers of gpt2 is 0: it must be a whole number, at least 1"),
        ("gpt2", {"layers": "2"}, "option layers of gpt2 is '2': it must be a whole number, at least 1"),
        ("gpt2", {"layers": True}, "option layers of gpt2 is True: it must be a whole number, at least 1"),
        ("gpt2", {"dropout": 1.0}, "option dropout of gpt2 is 1.0: it must be a probability, at least 0 and below 1"),
        ("gpt2", {"dropout": float("nan")}, "option dropout of gpt2 is nan: it must be a probability"),
        ("gpt2", {"tie": 1}, "option tie of gpt2 is 1: it must be true or false"),
        ("gpt2", {"attention": "flash"}, "option attention is 'flash': choose from sdpa, written"),
        ("gpt2", {"width": 10, "heads": 3}, "option width of gpt2 is 10: it must be a multiple of heads=3"),
        ("gpt2", {"dtype": "float8"}, "option dtype is 'float8': choose from float32, bfloat16, float16"),
        ("gpt2", {"device": "gpu"}, "device 'gpu' is not one that torch knows: write cpu, cuda or cuda:0"),
        ("llama", {"heads": 32, "kv_heads": 5}, "option kv_heads of llama is 5: it must divide heads=32"),
        ("llama", {"width": 96, "heads": 32}, "option width of llama is 96: it must be a multiple of 2 * heads = 64"),
        ("llama", {"rope_base": 0.0}, "option rope_base of llama is 0.0: it must be a number above 0"),
        ("vit", {"size": 200}, "option size of vit is 200: it must be a multiple of patch=16"),
        ("vit", {"width": 100}, "option width of vit is 100: it must be a multiple of heads=12"),
        ("resnet50", {"blocks": (3, 0)}, "option blocks of resnet50 is (3, 0): it must be whole numbers, each at least 1"),
        ("vgg16", {"size": 16}, "option size of vgg is 16: five halvings need at least 32"),
        ("unet", {"size": 100}, "option size of unet is 100: it must be a multiple of 2^depth = 16"),
        ("unet", {"norm": "group", "channels": 12}, "option channels of unet is 12: norm=group needs a multiple of 8"),
        ("unet", {"norm": "layer"}, "option norm is 'layer': choose from batch, group"),
        ("densenet121", {"size": 16}, "option size of densenet121 is 16: 4 blocks need at least 32"),
    ],
)
def test_wrong_options_raise(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlannerError) as error:
        build(name, **options)
    assert message in str(error.value)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused only where there is no CUDA device")
def test_missing_device_raises() -> None:
    with pytest.raises(UsageError, match="device 'cuda' is not on this machine"):
        build("mlp", device="cuda")


def test_listing_models_and_devices_does_not_import_torch() -> None:
    code = "import sys, planner.capture.workload.models, planner.settings.devices; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
