"""Changes of a model before or after ``fuse_``; each works by seed on any model."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from helpers import setting
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from tree_parts import Lora, LoudGELU, LoudReLU, Positive, Wrapped

# The values that hooks saw, in order; cleared before every run of a model.
LOG: list = []

ACTIVATION_MODULES = (nn.ReLU, nn.GELU, nn.ReLU6, nn.SiLU)
CONTAINERS = (nn.Sequential, nn.ModuleList)


@torch._dynamo.disable
def note(kind: str, *values) -> None:
    tensors = [v for v in values if torch.is_tensor(v)]
    LOG.append((kind, [(tuple(t.shape), float(t.detach().sum())) for t in tensors]))


def pick(rng: random.Random, model: nn.Module, kinds=nn.Module) -> nn.Module | None:
    """A module of these kinds, the same one in equal models."""
    found = [m for m in model.modules() if isinstance(m, kinds)]
    return rng.choice(found) if found else None


def new_activation(rng: random.Random) -> nn.Module:
    tanh, in_place = functools.partial(nn.GELU, "tanh"), functools.partial(nn.ReLU, inplace=True)
    makers = (nn.ReLU, nn.GELU, tanh, nn.Tanh, LoudReLU, LoudGELU, nn.Identity, in_place)
    return rng.choice(makers)()


def new_layer(rng: random.Random, i: int, o: int) -> nn.Module:
    layer = rng.choice([nn.Linear, Lora, functools.partial(nn.Linear, bias=False)])(i, o)
    return rng.choice([layer, layer, Wrapped(layer), nn.Sequential(layer, nn.ReLU())])


# Hooks -------------------------------------------------------------------------------------------


def hook(rng: random.Random, model: nn.Module) -> None:
    kinds = rng.choice([nn.Module, nn.Linear, ACTIVATION_MODULES, nn.Sequential])
    if (module := pick(rng, model, kinds)) is None:
        return
    factor = rng.choice([None, 2.0])

    def times(value):
        return None if factor is None or not torch.is_tensor(value) else value * factor

    def forward(module, args, output):
        note("forward", output)
        return times(output)

    def before(module, args):
        note("pre", *args)
        return None if factor is None or len(args) != 1 else (args[0] * factor,)

    def backward(module, grad_input, grad_output):
        note("backward", *grad_output)
        if factor is not None and all(map(torch.is_tensor, grad_input)):
            return tuple(g * factor for g in grad_input)
        return None

    def before_backward(module, grad_output):
        note("backward pre", *grad_output)
        return None if factor is None else tuple(g * factor for g in grad_output)

    first = functools.partial(module.register_forward_hook, prepend=True, always_call=True)
    ways = [(module.register_forward_hook, forward), (first, forward)]
    ways += [(module.register_forward_pre_hook, before)]
    ways += [(module.register_full_backward_hook, backward)]
    ways += [(module.register_full_backward_pre_hook, before_backward)]
    register, function = rng.choice(ways)
    register(function)


def parameter_hook(rng: random.Random, model: nn.Module) -> None:
    layer = pick(rng, model, nn.Linear)
    if layer is not None and isinstance(layer.weight, nn.Parameter) and layer.weight.requires_grad:
        layer.weight.register_hook(lambda g: g * 3)


# Layers ------------------------------------------------------------------------------------------


def parametrization(rng: random.Random, model: nn.Module) -> None:
    layer = pick(rng, model, nn.Linear)
    if layer is None or "weight" not in layer._parameters or isinstance(layer, Lora):
        return
    way = rng.randrange(5)
    if way == 0:
        parametrizations.weight_norm(layer)
    elif way == 1:
        nn.utils.weight_norm(layer)
    elif way == 2:
        parametrizations.spectral_norm(layer)
    elif way == 3:
        prune.random_unstructured(layer, "weight", 0.3)
    else:
        name = "bias" if layer.bias is not None and rng.random() < 0.5 else "weight"
        parametrize.register_parametrization(layer, name, Positive())


def frozen(rng: random.Random, model: nn.Module) -> None:
    layer = pick(rng, model, (nn.Linear, nn.Conv2d))
    if layer is not None:
        for p in rng.choice([list(layer.parameters()), [layer.weight]]):
            if p.is_leaf:
                p.requires_grad_(False)


def changed_parameter(rng: random.Random, model: nn.Module) -> None:
    layer = pick(rng, model, nn.Linear)
    if layer is None or "weight" not in layer._parameters or "bias" not in layer._parameters:
        return
    way, weight = rng.randrange(6), layer.weight.detach()
    if way == 0:
        layer.bias = None
    elif way == 1:
        layer.weight = nn.Parameter(weight * 2)
    elif way == 2:
        layer.weight.data = weight * 2
    elif way == 3:
        layer.bias = nn.Parameter(weight.new_ones(weight.shape[0]))
    elif way == 4:  # a buffer or plain tensor where the parameter was, as wrappers do
        del layer.weight
        layer.weight = weight * 2
    else:
        del layer.bias
        layer.register_buffer("bias", weight.new_ones(weight.shape[0]))


def tied(rng: random.Random, model: nn.Module) -> None:
    first, second = pick(rng, model, nn.Linear), pick(rng, model, nn.Linear)
    both = (first, second) if first is not None else ()
    if all("weight" in m._parameters for m in both) and len({m.weight.shape for m in both}) == 1:
        second.weight = first.weight


# Exchanges ---------------------------------------------------------------------------------------


def place(rng: random.Random, model: nn.Module, kinds) -> list[tuple[nn.Module, str, nn.Module]]:
    """Parent, name and module of one of these kinds; none if there is no such module."""
    pairs = [(parent, pair) for parent in model.modules() for pair in parent._modules.items()]
    found = [(parent, *pair) for parent, pair in pairs if isinstance(pair[1], kinds)]
    return [rng.choice(found)] if found else []


def exchanged_layer(rng: random.Random, model: nn.Module) -> None:
    for parent, name, layer in place(rng, model, nn.Linear):
        setattr(parent, name, new_layer(rng, layer.in_features, layer.out_features))


def exchanged_activation(rng: random.Random, model: nn.Module) -> None:
    for parent, name, _ in place(rng, model, ACTIVATION_MODULES):
        setattr(parent, name, new_activation(rng))


def activation_attribute(rng: random.Random, model: nn.Module) -> None:
    module = pick(rng, model, (nn.ReLU, nn.GELU))
    if isinstance(module, nn.GELU):
        module.approximate = rng.choice(["none", "tanh"])
    elif module is not None:
        module.inplace = not module.inplace


def list_edit(rng: random.Random, model: nn.Module) -> None:
    seq = pick(rng, model, CONTAINERS)
    if seq is None or not len(seq):
        return
    at, way = rng.randrange(len(seq)), rng.randrange(6)
    if way == 0 and f"{len(seq) - 1}" in seq._modules:  # torch inserts among numbers only
        seq.insert(at, new_activation(rng))
    elif way == 1:
        seq.append(new_activation(rng))
    elif way == 2:
        seq[at] = new_activation(rng)
    elif way == 3:
        seq.extend([nn.Identity(), new_activation(rng)])
    elif way == 4 and len(seq) > 1:
        del seq[at]
    elif isinstance(seq, nn.Sequential):
        seq.add_module(f"late{len(seq)}", new_activation(rng))


def sliced(rng: random.Random, model: nn.Module) -> None:
    for parent, name, seq in place(rng, model, nn.Sequential):
        if len(seq) and type(seq).__init__ is nn.Sequential.__init__:
            setattr(parent, name, seq[: rng.randrange(1, len(seq) + 1)])


def wrapped(rng: random.Random, model: nn.Module) -> None:
    for parent, name, child in place(rng, model, (nn.Linear, *ACTIVATION_MODULES)):
        setattr(parent, name, Wrapped(child))


# Methods and attributes --------------------------------------------------------------------------


def patched_forward(rng: random.Random, model: nn.Module) -> None:
    kinds = rng.choice([nn.Module, nn.Linear, nn.Linear, ACTIVATION_MODULES])
    if (module := pick(rng, model, kinds)) is not None:
        name = rng.choice(["forward", "forward", "_call_impl"])
        original = getattr(module, name)
        twice = functools.partial(lambda *args, **kwargs: original(*args, **kwargs) * 2)
        setattr(module, name, rng.choice([twice, twice.func]))


def patched_helper(rng: random.Random, model: nn.Module) -> None:
    found = [m for m in model.modules() if hasattr(m, "helper")]
    if found:
        rng.choice(found).helper = lambda x: x * 2


def patched_function(rng: random.Random, model: nn.Module) -> None:
    for module in model.modules():
        for name in ("fn", "act2"):
            if name in vars(module):  # a function, no module
                setattr(module, name, rng.choice([torch.tanh, F.gelu, lambda t: t - 1]))


def flags(rng: random.Random, model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "flag") and rng.random() < 0.5:
            module.flag = not module.flag
        if hasattr(module, "kind") and rng.random() < 0.5:
            module.kind = "tanh gelu"


def part_in_eval(rng: random.Random, model: nn.Module) -> None:
    """One module keeps its mode, as frozen parts of models do."""
    module = pick(rng, model)
    module.train = lambda mode=True: module
    for child in module.modules():
        child.training = False


def dropout(rng: random.Random, model: nn.Module) -> None:
    if (module := pick(rng, model, nn.Dropout)) is not None:
        module.p, module.inplace = rng.choice([0.0, 0.5, 1.0]), rng.random() < 0.5


def narrow_part(rng: random.Random, model: nn.Module) -> None:
    pick(rng, model).float()


# By name: the change, how often it is taken.
CHANGES: dict[str, tuple[Callable[[random.Random, nn.Module], None], int]] = {
    change.__name__: (change, weight)
    for weight, changes in (
        (8, (hook,)),
        (5, (parametrization, exchanged_activation, patched_forward)),
        (4, (frozen, changed_parameter, exchanged_layer, activation_attribute, list_edit)),
        (3, (tied, wrapped, patched_function, flags, part_in_eval, dropout)),
        (2, (parameter_hook, sliced, patched_helper)),
        (1, (narrow_part,)),
    )
    for change in changes
}


def some_changes(rng: random.Random, most: int) -> list[tuple[str, int]]:
    """Names and seeds of changes."""
    weights = [weight for _, weight in CHANGES.values()]
    names = rng.choices(list(CHANGES), weights, k=rng.choice(range(most + 1)))
    return [(name, rng.randrange(10**6)) for name in names]


def apply(changes: list[tuple[str, int]], model: nn.Module) -> None:
    for name, seed in changes:
        torch.manual_seed(seed)
        with setting(torch.set_default_dtype, torch.float64, torch.get_default_dtype()):
            CHANGES[name][0](random.Random(seed), model)


# Changes outside the model -----------------------------------------------------------------------


@contextlib.contextmanager
def global_hooks() -> Iterator[None]:
    """Hooks on all modules: what they see of layers and activations, they see after fusing, too."""
    hooks = nn.modules.module

    def see(kind, module, values):
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.ReLU, nn.GELU)):
            note(f"global {kind} {type(module).__name__}", *values)

    with contextlib.ExitStack() as stack:
        for handle in (
            hooks.register_module_forward_pre_hook(lambda m, i: see("pre", m, i)),
            hooks.register_module_forward_hook(lambda m, i, o: see("forward", m, [o])),
            hooks.register_module_full_backward_hook(lambda m, i, o: see("backward", m, o)),
        ):
            stack.callback(handle.remove)
        yield


PATCHED = (
    *((cls, name) for cls in (nn.Linear, nn.ReLU, nn.GELU, nn.Dropout, nn.Identity, nn.Conv2d)
      for name in ("forward", "__call__", "_call_impl")),
    *((nn.Module, name) for name in ("__call__", "_call_impl")),
    *((torch.Tensor, name) for name in ("relu", "relu_", "chunk", "__mul__")),
    *((F, name) for name in ("relu", "gelu", "linear", "dropout")),
    *((torch, name) for name in ("relu", "chunk")),
    (nn.Sequential, "forward"),
)  # fmt: skip


def patched(owner, name: str) -> contextlib.AbstractContextManager:
    """A function of torch's, or of a class, is another for a while."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def twice(*args, **kwargs):
        result = original(*args, **kwargs)
        if isinstance(result, tuple):
            return tuple(part + part for part in result)
        return result + result if torch.is_tensor(result) else result

    return mock.patch.object(owner, name, twice)


def world(kind: str | None, library) -> contextlib.AbstractContextManager:
    if kind is not None and kind.isdecimal():
        own = [(c, "forward") for n, c in vars(library).items() if n[0] == "C" and n[1:].isdigit()]
        return patched(*[*PATCHED, *own][int(kind) % len([*PATCHED, *own])])
    if kind == "global hooks":
        return global_hooks()
    if kind == "global names":  # which the classes' file defines
        kinds = {"relu": F.silu, "tanh gelu": F.gelu}
        return mock.patch.multiple(library, ACT=torch.tanh, tanh_gelu=torch.sigmoid, KINDS=kinds)
    if kind == "global relu":  # the file has its own F, in which relu is another function
        own = type("Functional", (), {**vars(F), "relu": staticmethod(torch.tanh)})
        return mock.patch.object(library, "F", own)
    return contextlib.nullcontext()
