"""fuse_ of models that torchao's convert_to_float8_training has converted, beside torchao's own."""

import copy
import dataclasses
import functools
import io

import pytest
import torch
import torch.nn.functional as F
from fused_models import decides, operators  # noqa: F401
from helpers import setting
from recipe import error
from torch import nn

import torch_fused_linear as tfl
from torch_fused_linear.fuse import plain

float8 = pytest.importorskip("torchao.float8")
Config = float8.Float8LinearConfig
pytestmark = pytest.mark.usefixtures("decides")
MLP, GATED, LINEAR = "float8_mlp", "float8_gated_mlp", "float8_linear"


class Mlp(nn.Module):
    """As timm has it."""

    def __init__(self, act=nn.GELU, drop=0.0, bias=True):
        super().__init__()
        self.fc1, self.act = nn.Linear(32, 64, bias=bias), act()
        self.drop1, self.norm = nn.Dropout(drop), nn.Identity()
        self.fc2, self.drop2 = nn.Linear(64, 32, bias=bias), nn.Dropout(drop)

    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        x = self.norm(x)
        x = self.fc2(x)
        return self.drop2(x)


class GatedMlp(nn.Module):
    """As LLaMA has it."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(32, 64, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(64, 32, bias=False), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Packed(nn.Module):
    """As Phi-3 has it."""

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(32, 128), nn.Linear(64, 32)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class OtherHalf(Packed):
    def forward(self, x):
        up, gate = self.gate_up(x).chunk(2, dim=-1)
        return self.down(up * F.silu(gate))


class Block(nn.Module):
    """As GPT-2 has it."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(32), nn.LayerNorm(32)])
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.c_fc, self.c_proj, self.gelu = nn.Linear(32, 128), nn.Linear(128, 32), nn.GELU("tanh")

    def forward(self, x):
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, 16)).transpose(1, 3)
        q, k, v = qkv.unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.c_proj(self.gelu(self.c_fc(self.norms[1](x))))


class Single(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(32, 64), nn.LayerNorm(64)

    def forward(self, x):
        return self.norm(F.relu(self.layer(x)))


def chain(*kinds):
    sizes = [32, 64, 48, 32]
    layers = [nn.Linear(*sizes[k : k + 2]) for k in range(3)]
    return nn.Sequential(layers[0], kinds[0](), layers[1], kinds[1](), layers[2])


MODELS = {
    "mlp": (Mlp, [MLP]),
    "mlp, ReLU": (lambda: Mlp(nn.ReLU), [MLP]),
    "mlp without biases": (lambda: Mlp(nn.SiLU, bias=False), [MLP]),
    "gated": (GatedMlp, [GATED]),
    "packed": (Packed, [GATED]),
    "GPT-2": (Block, [MLP]),
    "a layer with its activation": (Single, [LINEAR]),
    "three layers": (lambda: chain(nn.ReLU, nn.ReLU), [MLP]),
    "two activations": (lambda: chain(nn.ReLU, nn.GELU), [LINEAR, MLP]),
}


def converted(model, **options):
    """The model as torchao's functions convert it, and a copy of that which is fused."""
    plain = float8.convert_to_float8_training(model, config=Config(**options))
    fused = copy.deepcopy(plain)
    return plain, fused, tfl.fuse_(fused)


def results(model, x, grad):
    """The output, and the gradients of input and parameters."""
    x = x.detach().requires_grad_()
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], grad)]


def names_of(model, x):
    """The public operators that run."""
    return [name for name in operators(model, x) if not name.startswith("_")]


def assert_alike(got, want, tolerance):
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, k
        assert error(a, b) < tolerance, f"result {k}: {error(a, b):.1e}"


def assert_is_torchaos(model, plain):
    """Every call is torchao's own, so every bit is."""
    x, grad = torch.randn(2, 16, 32), torch.randn(2, 16, 32)
    assert names_of(model, x) == []
    for a, b in zip(results(model, x, grad), results(plain, x, grad), strict=True):
        assert torch.equal(a, b)


# --- what is fused ------------------------------------------------------------------------------


# Sums in another order move a value's cast to its neighbour. So does torchao's rounding before it
# adds a bias, in bf16 so often that there is none there.
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-2), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_torchao_does(name, dtype, tolerance):
    make, wanted = MODELS[name]
    model = make().to(dtype)
    if dtype == torch.bfloat16:
        for _, bias in filter(lambda p: p[0].endswith("bias"), model.named_parameters()):
            nn.init.zeros_(bias)
    plain, fused, report = converted(model)
    x = torch.randn(2, 16, 32, dtype=dtype)
    grad = torch.randn_like(plain(x))
    assert names_of(fused, x) == wanted and names_of(plain, x) == []
    assert_alike(results(fused, x, grad), results(plain, x, grad), tolerance)
    assert [name for block in report.fused for name in block.after if "float8" in name]


def test_projections_run_alone():
    plain, _, _ = converted(Block())
    fused = copy.deepcopy(plain)
    report = tfl.fuse_(fused, linear=True)
    x, grad = torch.randn(2, 16, 32), torch.randn(2, 16, 32)
    assert names_of(fused, x) == [LINEAR, LINEAR, MLP]
    assert_alike(results(fused, x, grad), results(plain, x, grad), 1e-2)
    alone = {block.layers: block.after for block in report.fused if len(block.layers) == 1}
    assert alone == {("qkv",): (LINEAR,), ("proj",): (LINEAR,)}


def test_emulated_products_are_a_reference_too():
    """torchao recommends emulation for GPUs without FP8."""
    model = Mlp()
    emulated, _, _ = converted(copy.deepcopy(model), emulate=True)
    _, fused, _ = converted(model)
    x, grad = torch.randn(32, 32), torch.randn(32, 32)
    assert_alike(results(fused, x, grad), results(emulated, x, grad), 1e-2)


def test_other_peoples_blocks():
    layers = pytest.importorskip("timm.layers")
    for model in (layers.Mlp(32, 64), layers.SwiGLU(32, 64)):
        plain, fused, report = converted(model)
        x, grad = torch.randn(2, 16, 32), torch.randn(2, 16, 32)
        assert len(names_of(fused, x)) == 1 and len(report.fused) == 1
        assert_alike(results(fused, x, grad), results(plain, x, grad), 1e-2)


def test_a_report_names_the_operators():
    _, _, report = converted(Block())
    (block,) = report.fused
    assert block.layers == ("c_fc", "c_proj") and block.after == ("float8_mlp (GELU (tanh))",)
    assert converted(Single())[2].fused[0].after == ("float8_linear (ReLU)",)
    assert converted(GatedMlp())[2].fused[0].after == ("float8_gated_mlp (SiLU)",)


@pytest.mark.parametrize("input, weights", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_dtypes_need_not_agree(input, weights):
    """A master weight in fp32 is cast to FP8 as it is, in torchao and here."""
    plain, fused, _ = converted(Mlp().to(getattr(torch, weights)))
    x, grad = (torch.randn(32, 32, dtype=getattr(torch, input)) for _ in range(2))
    assert names_of(fused, x) == [MLP]
    assert_alike(results(fused, x, grad), results(plain, x, grad), 3e-2)


def test_dropout_that_acts_stays_between_the_layers():
    plain, fused, _ = converted(Mlp(nn.ReLU, drop=0.5))
    x = torch.randn(32, 32)
    assert names_of(fused, x) == [LINEAR, LINEAR]
    torch.manual_seed(0)
    want = plain(x)
    torch.manual_seed(0)
    assert_alike([fused(x)], [want], 1e-2)
    assert names_of(fused.eval(), x) == [MLP]


@pytest.mark.parametrize("name", ["mlp", "gated", "packed", "two activations"])
def test_compiled(name, fresh_compiler):
    make, wanted = MODELS[name]
    _, fused, _ = converted(make())
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    x, grad = torch.randn(2, 16, 32), torch.randn(2, 16, 32)
    compiled = torch.compile(fused, fullgraph=True, backend=backend)
    for a, b in zip(results(compiled, x, grad), results(fused, x, grad), strict=True):
        assert torch.equal(a, b)
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [name.partition(".")[2] for name in called if name.startswith("fused.")] == wanted
    assert not [name for name in called if "scaled" in name.lower()]


# --- what is left to torchao --------------------------------------------------------------------

axiswise = float8.config.CastConfig(scaling_granularity=float8.config.ScalingGranularity.AXISWISE)
FAST, SLOW = (float8.config.Float8GemmConfig(use_fast_accum=value) for value in (True, False))
RECIPES = {
    "emulated": ({"emulate": True}, "torchao emulates its products"),
    "powers of two": ({"round_scales_to_power_of_2": True}, "scales are powers of two"),
    "padded": ({"pad_inner_dim": True}, "another product for output"),
    "slow": ({"gemm_config_output": SLOW}, "another product for output"),
    "fast": ({"gemm_config_grad_weight": FAST}, "another product for grad_weight"),
    "rows": (
        {"cast_config_input": axiswise, "cast_config_weight": axiswise},
        "another cast_config_input",
    ),
    "all-gather": ({"enable_fsdp_float8_all_gather": True}, "not a plain nn.Parameter"),
}


@pytest.mark.parametrize("make", [Mlp, GatedMlp])
@pytest.mark.parametrize("name", RECIPES)
def test_other_recipes_stay_torchaos(name, make):
    options, reason = RECIPES[name]
    _, fused, report = converted(make(), **options)
    assert not report.fused and not tfl.is_fused(fused)
    assert report.skipped and all(reason in skipped.reason for skipped in report.skipped)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_recipes_by_name(recipe):
    config = Config.from_recipe_name(recipe)
    model = float8.convert_to_float8_training(Mlp(), config=config)
    (skipped,) = tfl.fuse_(model).skipped
    assert skipped.reason == "its recipe is not torchao's tensorwise: another cast_config_input"
    model = float8.convert_to_float8_training(Mlp(), config=Config.from_recipe_name("tensorwise"))
    assert tfl.fuse_(model).fused


def other(**options):
    """Has a layer another configuration, as torchao makes it."""

    def change(layer):
        made = type(layer)(32, 64, config=dataclasses.replace(layer.config, **options))
        layer.config, layer.linear_mm_config = made.config, made.linear_mm_config

    return change


# Changes of one layer after fuse_.
CHANGES = {
    "powers of two": other(round_scales_to_power_of_2=True),
    "emulated": other(emulate=True),
    "slow": other(gemm_config_output=SLOW),
    "a hook": lambda layer: layer.register_forward_hook(lambda *args: None),
    "a pre-hook": lambda layer: layer.register_forward_pre_hook(lambda *args: None),
    "a forward of its own": lambda m: setattr(m, "forward", m.forward),
}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("make", [Mlp, GatedMlp, Packed])
def test_later_changes_of_a_layer_are_honoured(make, name, which):
    _, fused, _ = converted(make())
    x = torch.randn(32, 32)
    assert len(names_of(fused, x)) == 1
    layers = [m for m in fused.modules() if isinstance(m, nn.Linear)]
    CHANGES[name](layers[which])
    assert names_of(fused, x) in ([], [LINEAR])  # the other layer may keep its activation
    unfused = copy.deepcopy(fused)
    tfl.unfuse_(unfused)
    assert_alike([fused(x)], [unfused(x)], 1e-2)


@pytest.mark.parametrize("name", ["powers of two", "emulated"])
def test_later_changes_are_honoured_in_compiled_code(name, fresh_compiler):
    _, fused, _ = converted(Mlp())
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.code))
        return graph.forward

    compiled = torch.compile(fused, fullgraph=True, backend=backend)
    x = torch.randn(32, 32)
    compiled(x)
    for layer in (fused.fc2, fused.fc1):
        before = layer.config, layer.linear_mm_config
        CHANGES[name](layer)
        assert_alike([compiled(x)], [fused(x)], 1e-6)
        layer.config, layer.linear_mm_config = before
    assert MLP in graphs[0] and len(graphs) == 3 and not any(MLP in code for code in graphs[1:])


MIXED = {
    "first": lambda name: name == "fc1",
    "second": lambda name: name == "fc2",
}


@pytest.mark.parametrize("name", MIXED)
def test_layers_in_fp8_beside_others(name):
    model = float8.convert_to_float8_training(
        Mlp(), module_filter_fn=lambda layer, path: MIXED[name](path)
    )
    fused = copy.deepcopy(model)
    report = tfl.fuse_(fused)
    x, grad = torch.randn(32, 32), torch.randn(32, 32)
    assert names_of(fused, x) == ([LINEAR] if name == "first" else ["linear_gelu"])
    assert not any("mlp" in operator for block in report.fused for operator in block.after)
    assert_alike(results(fused, x, grad), results(model, x, grad), 1e-2)


@pytest.mark.parametrize("layer", ["gate_proj", "up_proj", "down_proj"])
def test_gated_layers_in_fp8_beside_others(layer):
    model = float8.convert_to_float8_training(
        GatedMlp(), module_filter_fn=lambda _, path: path != layer
    )
    fused = copy.deepcopy(model)
    report = tfl.fuse_(fused)
    x, grad = torch.randn(32, 32), torch.randn(32, 32)
    assert GATED not in str(report.fused) and "gated_mlp" not in names_of(fused, x)
    assert_alike(results(fused, x, grad), results(model, x, grad), 1e-2)


def test_a_sequence_of_layers_in_fp8_and_others():
    model = chain(nn.ReLU, nn.ReLU)
    plain = float8.convert_to_float8_training(model, module_filter_fn=lambda m, path: path != "0")
    fused = copy.deepcopy(plain)
    tfl.fuse_(fused)
    x, grad = torch.randn(32, 32), torch.randn(32, 32)
    assert names_of(fused, x) == ["linear_relu", MLP]
    assert_alike(results(fused, x, grad), results(plain, x, grad), 1e-2)


def test_halves_of_which_the_second_is_activated():
    """Two weights would have two scales, and torchao gives the packed one a single one."""
    plain, fused, report = converted(OtherHalf())
    assert any("second half" in skipped.reason for skipped in report.skipped)
    assert_is_torchaos(fused, plain)


def test_sizes_that_fp8_cannot_have():
    model = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 32))
    report = tfl.fuse_(float8.convert_to_float8_training(model))
    assert "[24, 32], and FP8 needs multiples of 16" in report.skipped[0].reason


def test_autocast_of_a_cpu_is_torchaos():
    """There torchao asks for the autocast of a GPU, and casts no input for a CPU's."""
    plain, fused, _ = converted(Mlp())
    x = torch.randn(32, 32)
    for device in ("cpu", "cuda"):  # the switch alone needs no GPU
        switch = functools.partial(torch.set_autocast_enabled, device)
        with setting(switch, True, False):
            assert names_of(fused, x) == [] and torch.equal(fused(x), plain(x))


@pytest.mark.cuda
def test_autocast_of_a_gpu(cuda):
    plain, fused, _ = converted(Mlp().to(cuda))
    x, grad = (torch.randn(32, 32, device=cuda) for _ in range(2))
    with torch.autocast("cuda", torch.bfloat16):
        assert names_of(fused, x) == [MLP]
        got, want = (results(m, x, grad.bfloat16()) for m in (fused, plain))
    assert_alike(got, want, 3e-2)


def test_a_release_with_other_options_is_not_known(monkeypatch):
    """It may compute something else by an option that is not known."""
    model = float8.convert_to_float8_training(Mlp())
    for layer in (model.fc1, model.fc2):
        layer.config = dataclasses.replace(layer.config)
        object.__setattr__(layer.config, "stochastic_rounding", True)
    monkeypatch.delitem(plain.LAYERS, type(model.fc1), raising=False)
    assert "release of torchao" in tfl.fuse_(model).skipped[0].reason


# --- what stays as it was -----------------------------------------------------------------------


def test_the_model_stays_what_it_was():
    plain, fused, _ = converted(Mlp())
    x = torch.randn(32, 32)
    want = fused(x)
    assert [*fused.state_dict()] == [*plain.state_dict()]
    assert [*map(type, fused.modules())] == [*map(type, plain.modules())]
    file = io.BytesIO()
    torch.save(fused, file)
    file.seek(0)
    for again in (copy.deepcopy(fused), torch.load(file, weights_only=False)):
        assert names_of(again, x) == [MLP] and torch.equal(again(x), want)
    tfl.unfuse_(fused)
    assert_is_torchaos(fused, plain)
    plain.load_state_dict(fused.state_dict())


def test_a_model_that_is_converted_after_fuse_is_torchaos():
    """The layers are new ones, without a mark."""
    model = Mlp()
    tfl.fuse_(model)
    model = float8.convert_to_float8_training(model)
    x = torch.randn(32, 32)
    assert names_of(model, x) == []
    tfl.fuse_(model)
    assert names_of(model, x) == [MLP]


def test_low_memory_is_the_same_operator():
    model = float8.convert_to_float8_training(Mlp())
    tfl.fuse_(model, memory="low")
    assert names_of(model, torch.randn(32, 32)) == [MLP]
