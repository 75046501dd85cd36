"""Decides which operators a run of calls becomes, and runs them.

A run ``f1, f2, ...`` of a tensor means ``for f in functions: x = f(x)``. At each place the longest
operator that fits is taken: :func:`torch_fused_linear.mlp` for linear layers with one activation
between them, a layer with its activation, or a layer alone. All of it is decided before anything
runs, and only where nothing but torch's own code would run: plain layers that ``fuse_`` has marked,
known activations, dropouts and identities.

``csrc/python/run.cpp`` decides the same in C for eager mode; torch.compile traces these functions.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional
from .._support.torch_internals import parallel_plan
from .._torch.subclasses import PLAIN
from ..activations import ACTIVATIONS
from ..functional import gated_mlp, linear, linear_glu
from ..nn.conv import FusedConv2dReLU
from .plain import METHODS, Rules, applied

Function = Callable[..., Any]
Held = tuple[Tensor, Tensor | None]


class Call(NamedTuple):
    """Layers that become one operator, with the activation after each (but the last of several),
    or a function that is called as it is."""

    layers: list[nn.Module]
    held: list[Held]
    kind: str | None
    function: Function | None = None


# --- what rewritten code calls ------------------------------------------------------------------


def run(x: Tensor, /, *functions: Function) -> Tensor | None:
    """Returns what the functions give one after the other, or None if one is not plain: then
    nothing has run."""
    calls, end = DECISION.calls_from(functions, 0, x)
    return DECISION._carry_out(calls, x) if calls and end == len(functions) else None


def nested(*given: Any) -> Any:
    """Returns ``f3(f2(f1(x)))`` of ``f3, f2, f1, x``, in the order in which that is evaluated."""
    *functions, x = given
    return DECISION._through(functions[::-1], x)


def alone(layer: Function, x: Any, /) -> Any:
    """Returns ``layer(x)``."""
    return DECISION._alone(layer, x)


def leads(module: nn.Module) -> bool:
    """Returns whether an nn.Sequential holds marked layers and iterates over its modules."""
    if type(module).__iter__ is not nn.Sequential.__iter__:
        return False
    return any(DECISION.mark_of(child) is not None for child in module._modules.values())


def sequence(module: nn.Module, x: Any, i: int = 0) -> Any:
    """Returns what the loop of nn.Sequential returns, from a module of it on."""
    functions = [*module._modules.values()]
    while i < len(functions):
        calls, end = DECISION.calls_from(functions, i, x)
        if calls:
            x, i = DECISION._carry_out(calls, x), end
            continue
        x, i, before = DECISION._alone(functions[i], x), i + 1, len(functions)
        functions = [*module._modules.values()]  # it may have changed them
        if len(functions) != before:
            raise RuntimeError("dictionary changed size during iteration")
    return x


def gated(
    x: Tensor, act: Function, gate: Function, up: Function, /, *after: Function
) -> Tensor | None:
    """Returns ``act(gate(x)) * up(x)`` and what the functions after it make of it, or None if one
    is not plain: then nothing has run."""
    one, other, kind = (
        DECISION._matrix_of(gate, x),
        DECISION._matrix_of(up, x),
        DECISION.plain_kind(act),
    )
    if one is None or other is None or kind is None or one[0].shape != other[0].shape:
        return None
    if DECISION.is_float8(gate) is not DECISION.is_float8(up):
        return None
    return DECISION._gated((x, one[0], other[0], one[1], other[1]), kind, gate, after)


def halves(
    x: Tensor, act: Function, layer: Function, number: int, chunk: Function, /, *after: Function
) -> Tensor | None:
    """Returns the same for the two halves of a layer's result, of which the one of that number is
    activated. ``chunk`` makes the two."""
    held, kind = DECISION._matrix_of(layer, x), DECISION.plain_kind(act)
    if held is None or kind is None or held[0].shape[0] % 2 or not DECISION._is_in_two(x, chunk):
        return None
    if DECISION._is_in_place(act):  # which torch forbids for a half where there are gradients
        return None
    weight, bias = held
    if number == 0:
        return DECISION._gated((x, weight, None, bias, None), kind, layer, after)
    if DECISION.is_float8(layer):  # the halves, as weights of their own, would have two scales
        return None
    up, gate = weight.chunk(2)
    up_bias, gate_bias = (None, None) if bias is None else bias.chunk(2)
    return DECISION._gated((x, gate, up, gate_bias, up_bias), kind, layer, after)


def method_chunk(h, /, *args, **named):
    return h.chunk(*args, **named)


class Decision(Rules):
    """The decision about a run, in methods: Dynamo tests before each call of compiled code that a
    module still has the functions which were traced, and tests no methods."""

    def calls_from(
        self, functions: Sequence[Function], start: int, x: Any
    ) -> tuple[list[Call], int]:
        """The calls of marked layers from this place on, and the place behind them."""
        calls: list[Call] = []
        i, before = start, ()
        while i < len(functions):
            layer = functions[i]
            held = self._held_after(layer, *before) if calls else self._held(layer, x)
            if held is not None:
                found, i = self._with_activation(functions, i, held)
                calls += found
                before = layer, held
                continue
            share = self._share_of(layer) if calls else None
            if share is None:
                break
            calls += [Call([], [], None, layer)] if share else []
            i += 1
        return self._joined(calls), i

    def _with_activation(
        self, functions: Sequence[Function], i: int, held: Held
    ) -> tuple[list[Call], int]:
        """A layer with its activation, if it has one, and the place behind it."""
        layer, end, drops = functions[i], i + 1, []
        is_convolution = type(layer) is nn.Conv2d
        while end < len(functions) and (share := self._share_of(functions[end])) is not None:
            drops += [Call([], [], None, functions[end])] if share else []
            end += 1
        kind = self._kind_of(functions[end]) if end < len(functions) else None
        # A dropout and ReLU may change places, as a dropout keeps the sign.
        is_taken = kind == "relu" or (kind is not None and not drops and not is_convolution)
        if not is_taken or not self._takes_activation(layer, held):
            function = layer if is_convolution else None
            return [Call([layer], [held], None, function)], i + 1
        end += 1
        may_square = kind == "relu" and end < len(functions) and not drops and not is_convolution
        if may_square and self._is_square(functions[end]):
            kind, end = "relu2", end + 1
        return [Call([layer], [held], kind), *drops], end

    def _joined(self, calls: list[Call]) -> list[Call]:
        """Joins a layer with those before it that have one activation."""
        found: list[Call] = []
        for call in calls:
            if call.function is None and call.kind is None and self._may_join(call):
                above, kind = [call], found[-1].kind if found else None
                while found and found[-1].kind == kind is not None and self._may_join(found[-1]):
                    above.insert(0, found.pop())
                layers = [layer for one in above for layer in one.layers]
                held = [each for one in above for each in one.held]
                call = Call(layers, held, kind if len(layers) > 1 else None)
            found.append(call)
        return found

    def _may_join(self, call: Call) -> bool:
        is_linear = len(call.layers) == 1 and type(call.layers[0]) is not nn.Conv2d
        # jit.trace cannot record a list of optional tensors
        return is_linear and type(call.held[0][0]) in PLAIN and not torch.jit.is_tracing()

    def _through(self, functions: Sequence[Function], x: Any) -> Any:
        i = 0
        while i < len(functions):
            calls, end = self.calls_from(functions, i, x)
            if calls:
                x, i = self._carry_out(calls, x), end
            else:
                x, i = self._alone(functions[i], x), i + 1
        return x

    def _alone(self, function: Function, x: Any) -> Any:
        """A function with which no run begins: as an operator, if it is a plain layer that is
        marked to run alone."""
        held = self.parameters(function) if self.runs_alone(function) else None
        if held is None or not self.fits(function, x, *held):
            return function(x)
        return self._one(function, held, None, x)

    def _carry_out(self, calls: list[Call], x: Any) -> Any:
        for layers, held, kind, function in calls:
            if function is not None:
                x = function(x)
            elif len(layers) > 1:
                weights, biases = [weight for weight, _ in held], [bias for _, bias in held]
                if self.is_float8(layers[0]):
                    x = torch.ops.fused.float8_mlp(x, weights, biases, kind)
                    continue
                is_low = any(self.memory_of(layer) == "low" for layer in layers)
                memory = "low" if is_low else "default"
                x = torch.ops.fused.mlp(x, weights, biases, kind, memory=memory)
            else:
                x = self._one(layers[0], held[0], kind, x)
        return x

    def _one(self, layer: nn.Module, held: Held, kind: str | None, x: Tensor) -> Tensor:
        """One layer, with its activation."""
        if type(layer) is nn.Conv2d:
            return FusedConv2dReLU.forward(layer, x)
        if self.is_float8(layer):
            return torch.ops.fused.float8_linear(x, *held, kind or "none")
        if kind is None:
            return self._between_hooks(linear, layer, held, x)
        activation, memory = ACTIVATIONS[kind], self.memory_of(layer) or "default"
        operator = partial(getattr(functional, activation.operator), **activation.options)
        return self._between_hooks(partial(operator, memory=memory), layer, held, x)

    def _between_hooks(self, operator: Function, layer: nn.Module, held: Held, x: Tensor) -> Tensor:
        """A layer under a plan of tensor parallelism runs between its hooks, which distribute the
        input and give the output its layout."""
        weight, bias = held
        if type(weight) in PLAIN:
            return operator(x, weight, bias)
        (before,), (after,) = layer._forward_pre_hooks.values(), layer._forward_hooks.values()
        prepared = before(layer, (x,))
        return after(layer, (prepared,), operator(prepared, weight, bias))

    # --- what is plain ----------------------------------------------------------------------------

    def _held(self, layer: Function, x: Any) -> Held | None:
        """Returns weight and bias of a marked plain layer that fits its input, or None."""
        held = None if self.memory_of(layer) is None else self.parameters(layer)
        return held if held is not None and self.fits(layer, x, *held) else None

    def _held_after(self, layer: Function, before: nn.Module, given: Held) -> Held | None:
        """Returns weight and bias of one that fits the output of the layer `before` with these, or
        None. A layer in FP8 and one that is not are never in one run."""
        held = None if self.memory_of(layer) is None else self.parameters(layer)
        if held is None or self.is_float8(layer) is not self.is_float8(before):
            return None
        (weight, _), like = held, given[0]
        if type(weight) not in PLAIN or type(like) not in PLAIN:
            return held if type(weight) is type(like) else None
        groups = layer.groups if type(layer) is nn.Conv2d else 1
        fits = weight.dim() == like.dim() and weight.shape[1] * groups == like.shape[0]
        return held if fits and self.agree(layer, like, *held) else None

    def _matrix_of(self, layer: Function, x: Any) -> Held | None:
        held = None if type(layer) is nn.Conv2d else self._held(layer, x)
        return held if held is not None and held[0].dim() == 2 and type(held[0]) in PLAIN else None

    def _takes_activation(self, layer: nn.Module, held: Held) -> bool:
        if type(layer) is nn.Conv2d:
            return self.has_known_geometry(layer)
        if type(held[0]) in PLAIN:
            return True
        style, layouts = parallel_plan(layer)
        # a sum that is not whole yet has no activation
        return style == "ColwiseParallel" and not any(layout.is_partial() for layout in layouts)

    def _taken_apart(self, function: Function) -> tuple[Function, tuple, dict]:
        """The function of a ``partial`` that rewritten code has made, and what it is given
        beside the tensor."""
        if type(function) is not partial:
            return function, (), {}
        if function.func is applied:
            return function.args
        return (function, (), {}) if function.args else (function.func, (), function.keywords)

    def _kind_of(self, function: Function) -> str | None:
        called, more, named = self._taken_apart(function)
        if len(more) > 1 or (more and named):
            return None
        return self.plain_kind(called, {"inplace": more[0]} if more else named)

    def _share_of(self, function: Function) -> float | None:
        called, more, named = self._taken_apart(function)
        return self.dropped_share(called, more, named)

    def _is_square(self, function: Function) -> bool:
        called, more, named = self._taken_apart(function)
        is_wide = torch.is_autocast_enabled("cuda")  # in which torch squares in fp32
        return not named and not is_wide and self.is_square(called, more)

    def _is_in_two(self, x: Any, chunk: Function) -> bool:
        """Returns whether it makes two halves of the last dimension."""
        called, more, named = self._taken_apart(chunk)
        is_known = called is method_chunk or called is torch.chunk
        return is_known and self._are_two_of(x, *more, **named)

    def _are_two_of(self, x: Any, chunks: Any = None, dim: Any = 0, **others: Any) -> bool:
        is_last = dim == -1 or (type(x) in PLAIN and dim == x.dim() - 1)
        return not others and chunks == 2 and is_last

    def _is_in_place(self, function: Function) -> bool:
        given = function.keywords if type(function) is partial else {}
        is_set = given.get("inplace") or getattr(function, "inplace", False)
        return bool(is_set) or function is torch.relu_ or function is METHODS["relu_"]

    # --- gated layers -----------------------------------------------------------------------------

    def _gated(self, tensors: tuple, kind: str, gate: nn.Module, after: Sequence) -> Tensor | None:
        """The gated layer, as one operator with the layer after it if no dropout acts between."""
        x, weight, up, gate_bias, up_bias = tensors
        drops, down = [], None
        for function in after:
            share = self._share_of(function)
            if down is not None or (share is None and function is not after[-1]):
                return None
            if share is None:
                features = weight.shape[0] // (2 if up is None else 1)
                down = self._down(function, gate, weight, features)
                if down is None:
                    return None
            elif share:
                drops.append(function)
        options = {"activation": kind, "memory": self.memory_of(gate) or "default"}
        if self.is_float8(gate):
            if down is None or drops:
                return None
            tensors = x, weight, up, down[0], gate_bias, up_bias, down[1]
            return torch.ops.fused.float8_gated_mlp(*tensors, kind)
        if down is not None and not drops:
            return gated_mlp(x, weight, up, down[0], gate_bias, up_bias, down[1], **options)
        h = linear_glu(x, weight, up, gate_bias, up_bias, **options)
        for drop in drops:
            h = drop(h)
        return h if down is None else linear(h, *down)

    def _down(self, layer: Function, gate: nn.Module, like: Tensor, features: int) -> Held | None:
        """Weight and bias of the layer after the gated one, whose weight is `like`."""
        is_marked = self.memory_of(layer) is not None and type(layer) is not nn.Conv2d
        held = self.parameters(layer) if is_marked else None
        if held is None or self.is_float8(layer) is not self.is_float8(gate):
            return None
        if type(held[0]) not in PLAIN or not self.agree(layer, like, *held):
            return None
        return held if held[0].dim() == 2 and held[0].shape[1] == features else None


DECISION = Decision()
