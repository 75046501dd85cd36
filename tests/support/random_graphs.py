"""Random graphs of layers, built alike of fused operators and of plain torch, and asked alike.

A seed gives the layers and how they meet, how they keep what the backward needs (checkpoints, hooks
on saved tensors), hooks of every kind, roots, and what is asked of them: first or second
derivatives, for some inputs only, batched, forward mode, again later, of what was freed. fp64.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from operators import ACTS, FORMS, Op, gated, linear, mlp
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

WIDTH = 3
DUAL = threading.Lock()  # torch has one level of forward mode for all threads
Results = list[Tensor | None]


def larger(saved: Tensor) -> Tensor:
    """A hook that changes what is saved, and shows by the gradients what that was."""
    return saved * 1.5 if saved.is_floating_point() else saved


class Parameters:
    """Leaves that all graphs, in all threads, share: gradients are returned, never kept in them."""

    def __init__(self, scale: float = 1.0) -> None:
        gen = torch.Generator().manual_seed(11)

        def leaf(*shape: int) -> Tensor:
            values = torch.randn(*shape, generator=gen, dtype=torch.float64) * scale
            return values.requires_grad_()

        self.weights = [leaf(WIDTH, WIDTH) for _ in range(4)]
        self.biases = [leaf(WIDTH) for _ in range(4)]
        self.both = [leaf(2 * WIDTH, WIDTH), leaf(2 * WIDTH)]  # of gate and up
        self.inputs = [leaf(2, WIDTH) for _ in range(2)] + [leaf(1, 2, WIDTH)]
        self.leaves = [*self.weights, *self.biases, *self.both, *self.inputs]
        self.frozen = [t.detach() * 0.9 for t in self.weights]


class Graph:
    """One graph, its watchers and its roots."""

    def __init__(
        self,
        parameters: Parameters,
        seed: int,
        is_fused: bool,
        around: Callable[[], AbstractContextManager] = nullcontext,
        reentrant: bool = False,
        may_watch: bool = True,
    ) -> None:
        self.choice, self.parameters = random.Random(seed), parameters
        self.around = around  # every backward
        self.reentrant = reentrant  # checkpoints of that kind, which give .grad alone
        self.may_watch = may_watch
        self.is_fused = is_fused
        self.seen: list[Tensor] = []
        self.retained: list[Tensor] = []
        self.is_watched = False  # batched gradients can be looked at by nobody
        self.is_kept = False  # what is saved passes through hooks: first and second order only
        self.is_lossy = False  # and is changed by them: first order only
        start = self.choice.choice(parameters.inputs)
        self.made = [start, *(start * k for k in (0.5, -1))]
        if self.choice.random() < 0.1:
            self.made[1] = start.detach()
        for _ in range(self.choice.randrange(1, 7)):
            self.made.append(self.watch(self.grow()))

    # --- what is built ---------------------------------------------------------------------------

    def weight(self) -> Tensor:
        p = self.parameters
        weight = self.choice.choice(p.frozen if self.choice.random() < 0.15 else p.weights)
        return weight.t() if self.choice.random() < 0.15 else weight

    def bias(self) -> Tensor | None:
        return self.choice.choice([*self.parameters.biases, None])

    def apply(self, op: Op, *tensors: Tensor | None) -> Tensor:
        return op.call(*tensors) if self.is_fused else op.eager(*tensors)

    def layer(self, x, weight, bias, activation, memory) -> Tensor:
        options = {} if activation == "none" else {"memory": memory}
        return self.apply(linear(activation, **options), x, weight, bias)

    def gate_and_up(self, form: str) -> list[list[Tensor | None]]:
        """Their weights and their biases."""
        if form == "apart":
            return [[f() for _ in range(2)] for f in (self.weight, self.bias)]
        weight, bias = self.parameters.both
        return [[weight], [self.choice.choice([bias, None])]]

    def grow(self) -> Tensor:
        choice = self.choice
        # mostly from the newest, so that there are chains
        x = self.made[-1] if choice.random() < 0.7 else choice.choice(self.made)
        other = choice.choice(self.made)
        activation = choice.choice(["none", *ACTS])
        memory = choice.choice(["default", "default", "low"])
        kind = choice.random()
        if kind < 0.2 and activation != "none":
            form, has_down = choice.choice(["apart", *FORMS]), kind > 0.12
            weights, biases = self.gate_and_up(form)
            if has_down:
                weights, biases = [*weights, self.weight()], [*biases, self.bias()]
            op = gated(form, activation, has_down, memory=memory)
            return self.keep(lambda x: self.apply(op, x, *weights, *biases), x)
        if kind < 0.6:
            given = self.weight(), self.bias(), activation, memory
            return self.keep(lambda x: self.layer(x, *given), x, activation)
        if kind < 0.72:
            n = choice.choice([1, 2, 2, 3])
            weights, biases = ([f() for _ in range(n)] for f in (self.weight, self.bias))
            chain = mlp(choice.choice(list(ACTS)), n, memory=memory)
            return self.keep(lambda x: self.apply(chain, x, *weights, *biases), x)
        ways = [
            lambda: x * other,
            lambda: x + other,
            lambda: F.linear(x, self.weight()).cos(),
            lambda: x.detach() * 0.5 + other,
            lambda: x.view(-1).view(x.shape),
            lambda: self.layer(x, (other.mT @ other).reshape(3, 3) * 0.1, None, activation, memory),
            lambda: self.layer(x, self.weight(), other.reshape(-1, WIDTH)[0], activation, memory),
            lambda: x.sum() * other,
        ]
        return choice.choice(ways)()

    def keep(self, call, x: Tensor, lone: str = "") -> Tensor:
        """Calls a layer as it is, within a checkpoint, alone or with one after it, or under hooks
        on what it saves; `lone`: the activation of one that saves what torch saves."""
        way = self.choice.random()
        after = self.weight(), self.bias(), self.choice.choice(["none", *ACTS]), "low"
        if way > 0.3:
            return call(x)
        self.is_kept = True
        if way < 0.1:
            return checkpoint(call, x, use_reentrant=self.reentrant)
        if way < 0.2:
            return checkpoint(
                lambda x: self.layer(call(x), *after), x, use_reentrant=self.reentrant
            )
        if way < 0.25 and lone in ("none", "relu", "gelu_tanh", "gelu_erf"):
            self.is_lossy = True
            with saved_tensors_hooks(larger, lambda kept: kept):
                return call(x)
        with saved_tensors_hooks(lambda saved: [saved.clone()], lambda kept: kept[0]):
            return call(x)

    def watch(self, y: Tensor) -> Tensor:
        if y.requires_grad and self.choice.random() < 0.25:
            self.hook(y)
        return y

    def hook(self, y: Tensor) -> None:
        if y.grad_fn is None or not self.may_watch:
            return
        see, self.is_watched = self.seen.append, True
        ways = [
            lambda: y.register_hook(lambda g: see(g.detach().clone())),
            lambda: y.register_hook(lambda g: g.cos()),
            lambda: (y.retain_grad(), self.retained.append(y)),
            lambda: y.grad_fn.register_prehook(lambda grads: see(grads[0].detach().clone())),
            lambda: y.grad_fn.register_prehook(lambda grads: (grads[0] * 2, *grads[1:])),
            # of what it passes on only the presence: a fused node has other inputs
            lambda: y.grad_fn.register_hook(lambda _, outs: see(outs[0].detach().clone())),
        ]
        self.choice.choice(ways)()

    # --- what is asked ---------------------------------------------------------------------------

    def run(self) -> Results:
        choice = self.choice
        made = [y for y in self.made[3:] if y.requires_grad]
        if not made:
            return []
        roots = made[-1:]
        while choice.random() < 0.5:
            roots.append(choice.choice(made))
        roots = list({id(root): root for root in roots}.values())
        wanted = list(self.parameters.leaves)
        if choice.random() < 0.4:
            wanted = choice.sample(wanted, choice.randrange(1, len(wanted)))
        if choice.random() < 0.15:
            wanted.append(choice.choice(made))
        results = self.ask(roots, wanted)
        if choice.random() < 0.25:  # hooks that came later, other roots, the same graph
            self.hook(choice.choice(made))
            results += self.ask([choice.choice(made)], list(self.parameters.leaves))
        seen = sorted((g.flatten() for g in self.seen), key=lambda g: (len(g), g.sum().item()))
        return results + seen + [y.grad for y in self.retained]

    def ask(self, roots: list[Tensor], wanted: list[Tensor]) -> Results:
        gradients = [root.detach().sin() for root in roots]
        options = {"allow_unused": True, "retain_graph": True}
        kind = self.choice.random()
        if self.reentrant:
            with self.around():
                torch.autograd.backward(roots, gradients, retain_graph=True)
            return [None if t.grad is None else t.grad.clone() for t in self.parameters.leaves]
        if kind < 0.55 or self.is_lossy:
            with self.around():
                return list(torch.autograd.grad(roots, wanted, gradients, **options))
        if kind < 0.8 or self.is_kept:
            return self.twice(roots, wanted, gradients)
        if kind < 0.9 and not self.is_watched:
            batched = [torch.stack([g, g.cos()]) for g in gradients]
            options["is_grads_batched"] = True
            return list(torch.autograd.grad(roots, wanted, batched, **options))
        with DUAL, fwAD.dual_level():
            duals = [fwAD.make_dual(g, g.cos()) for g in gradients]
            found = torch.autograd.grad(roots, wanted, duals, **options)
            parts = [None if g is None else fwAD.unpack_dual(g) for g in found]
            return [None if p is None else part for p in parts for part in (p or (None, None))]

    def twice(self, roots: list[Tensor], wanted: list[Tensor], gradients: list[Tensor]) -> Results:
        """First derivatives, and those of the sum of their squares."""
        for g in gradients:
            g.requires_grad_()
        options = {"allow_unused": True, "retain_graph": True}
        with self.around():
            first = torch.autograd.grad(
                roots, wanted, gradients, create_graph=True, allow_unused=True
            )
        linked = [g for g in first if g is not None and g.requires_grad]
        if not linked:
            return list(first)
        total = sum((g * g).sum() for g in linked)
        leaves = [*self.parameters.leaves, *gradients]
        with self.around():
            return [*first, *torch.autograd.grad(total, leaves, **options)]


def scaled(results: Results) -> Results:
    """Products of products grow; what is compared is brought to magnitude 1."""
    return [t if t is None else t.detach() / (1 + t.detach().abs().max()) for t in results]
