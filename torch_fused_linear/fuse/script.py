"""What TorchScript gets, which compiles text and cannot decide anything when it runs.

So it is decided when the model is scripted: where layer and activation are plain then, the text has
the operator, and anywhere else what it always had. Python goes on running the decisions of call.py.
"""

from __future__ import annotations

import ast

from torch import nn

from . import classes, fit
from .call import _has_any_global_hook
from .classes import SEQUENTIAL, Config, origin, subclass
from .families import CONV1D, full_name
from .products import Product
from .reading import Text
from .resolve import Resolver
from .rewrite import Mark, arguments, unwrapped
from .steps import Run

SEQUENTIAL_TEXT = """def forward(self, input):
    if fused_is_scripting():
{}
        return input
    else:
        return fused_run_sequential(self, input)
"""


def script_config(module: nn.Module, config: Config) -> Config:
    """The same with what is fused now, layer by layer."""
    functions = []
    for entry in config.functions:
        base = next(c for c in origin(type(module)).__mro__ if full_name(c) == entry.cls)
        if (base, entry.name) == SEQUENTIAL:
            config = config._replace(script=sequential_text(module, config))
            functions.append(entry)
            continue
        text = Text(unwrapped(vars(base)[entry.name]))
        resolver = Resolver(module, text)
        marks = tuple(
            mark._replace(script=(not config.refused and chosen(text, resolver, mark)) or ())
            for mark in entry.marks
        )
        functions.append(entry._replace(marks=marks))
    return config._replace(functions=tuple(functions))


def chosen(text: Text, resolver: Resolver, mark: Mark) -> tuple[str, str] | None:
    """The operator for a mark and its arguments after the parameters; None for the original."""
    steps = text.runs[mark.run][mark.first : mark.last + 1]
    if any(is_in_with(text, step.node) for step in steps):
        return None
    if isinstance(steps[0], Product):
        return chosen_gated(steps, resolver, mark.low)
    layers = [v.value for v in resolver.values(steps[0].callee) if isinstance(v.value, nn.Module)]
    between = [v.value for step in steps[1:-1] for v in resolver.values(step.callee)]
    if len(between) != max(len(steps) - 2, 0) or _has_any_global_hook():
        return None
    kinds = {None}
    if mark.last > mark.first:
        act = steps[-1]
        found = [v.value for v in resolver.values(act.callee) if fit.is_activation(v.value)]
        kinds = {fit.plain_kind(value, act.options() or None) for value in found}
        kinds = kinds if act.callee is not None else {"relu"}
        if kinds == {None}:
            return None
    found = {operator(layer, kind, between, mark.low) for layer in layers for kind in kinds}
    return found.pop() if len(found) == 1 else None


def is_in_with(text: Text, node: ast.AST) -> bool:
    """Whether it is in a block that may be autocast's, which TorchScript carries out by the names
    of torch's operators."""
    blocks = (n for n in ast.walk(text.node) if isinstance(n, ast.With))
    return any(n is node for block in blocks for n in ast.walk(block))


def chosen_gated(steps: Run, resolver: Resolver, low: bool) -> tuple[str, str] | None:
    """The same for a gated layer that is written in one way, and for the block."""
    form, *others = steps[0].forms
    act, layers = form.act, [*form.layers, *steps[1:][-1:]]
    found = [v.value for layer in layers for v in resolver.values(layer.callee)]
    between = [v.value for step in steps[1:-1] for v in resolver.values(step.callee)]
    kinds = ["relu"]
    if act.callee is not None:
        options = act.options() or None
        kinds = [fit.plain_kind(v.value, options) for v in resolver.values(act.callee)]
    if others or len(kinds) != 1 or None in kinds or len(found) != len(layers):
        return None
    if not all(fit.is_linear(m) and operator(m, None, between, False) for m in found):
        return None
    if form.halves is not None and arguments(form.halves) not in ("2, -1", "2, dim=-1"):
        return None
    if form.halves is None and found[0].weight.shape != found[1].weight.shape:
        return None
    texts = [(ast.unparse(layer.callee), m) for layer, m in zip(layers, found)]
    tensors = []
    for name in ("weight", "bias"):
        held = [f"{text}.{name}" if getattr(m, name) is not None else "None" for text, m in texts]
        if form.halves is not None:
            both = held.pop(0)
            held[:0] = [both, "None"] if form.order[0] == "0" else [
                both if both == "None" else f"{both}.chunk(2)[{k}]" for k in (1, 0)]  # fmt: skip
        tensors += held
    name = "gated_mlp" if len(steps) > 1 else "linear_glu"
    memory = "low" if low else "default"
    return name, f", {', '.join(tensors)}, {kinds[0]!r}, {memory!r}"


def operator(layer: nn.Module, kind: str | None, between: list, low: bool) -> tuple | None:
    if not fit.is_layer(layer) or fit.linear_objection(layer) or full_name(type(layer)) == CONV1D:
        return None
    if not all(isinstance(d, nn.Module) and fit.is_passed(d) for d in between):
        return None
    if kind != "relu" and any(type(d) is not nn.Identity and d.p != 0 for d in between):
        return None
    memory = ", 'low'" if low else ", 'default'"
    if isinstance(layer, nn.Conv2d):
        if kind != "relu" or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            return None
        numbers = map(list, (layer.stride, layer.padding, layer.dilation))
        return "conv2d_relu", ", {}, {}, {}, {}".format(*numbers, layer.groups)
    if kind is None:
        return "linear", ""
    if kind in ("relu", "silu"):
        return f"linear_{kind}", memory
    return "linear_gelu", f", {'tanh' if kind == 'gelu_tanh' else 'none'!r}{memory}"


def sequential_text(module: nn.Module, config: Config) -> str:
    """The children of an nn.Sequential one by one."""
    lines, children, k = [], list(module._modules.items()), 0
    while k < len(children):
        name, child = children[k]
        end = k + 1
        while end < len(children) and fit.is_passed(children[end][1]):
            end += 1
        call = None
        if fit.is_layer(child) and name not in config.refused and not _has_any_global_hook():
            if end < len(children) and fit.is_activation(children[end][1]):
                kind = fit.plain_kind(children[end][1])
                between = [m for _, m in children[k + 1 : end]]
                call = kind and operator(child, kind, between, name in config.low)
            if call is None:
                end = k
                call = operator(child, None, [], False) if name in config.follows else None
        layer = f"getattr(self, {name!r})"
        if call is None:
            lines.append(f"input = {layer}(input)")
            k += 1
            continue
        lines.append(f"input = fused_{call[0]}(input, {layer}.weight, {layer}.bias{call[1]})")
        lines += [f"input = getattr(self, {n!r})(input)" for n, _ in children[k + 1 : end]]
        k = end + 1
    return SEQUENTIAL_TEXT.format("\n".join(f"        {line}" for line in lines) or "        pass")


def scripted(module: nn.Module) -> type:
    """The class whose code torch.jit.script can compile, fused where the types say so now."""
    return subclass(origin(type(module)), script_config(module, vars(type(module))["__fused__"]))


classes.scripted = scripted
