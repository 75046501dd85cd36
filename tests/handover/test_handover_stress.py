"""2,000 random graphs in eight threads that share parameters: every gradient is the plain one."""

import collections
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from helpers import one_thread  # noqa: F401
from stacks import OPS, assert_same
from torch import Tensor

import torch_fused_linear as tfl

THREADS, GRAPHS, WIDTH = 8, 2000, 3
ACTIVATIONS = list(OPS)


class Parameters:
    """Leaves that all threads use at once. Gradients are returned, never accumulated in them."""

    def __init__(self) -> None:
        gen = torch.Generator().manual_seed(11)

        def leaf(*shape):
            return torch.randn(*shape, generator=gen, dtype=torch.float64).requires_grad_()

        self.weights = [leaf(WIDTH, WIDTH) for _ in range(4)]
        self.biases = [leaf(WIDTH) for _ in range(4)]
        self.inputs = [leaf(2, WIDTH) for _ in range(3)]
        self.leaves = [*self.weights, *self.biases, *self.inputs]


class Graph:
    """One random graph, its watchers and its roots; the same for the same seed."""

    def __init__(self, parameters: Parameters, seed: int) -> None:
        self.choice, self.parameters = random.Random(seed), parameters
        self.seen: list[Tensor] = []
        self.retained: list[Tensor] = []
        self.made = list(parameters.inputs)
        for _ in range(self.choice.randrange(2, 12)):
            self.made.append(self.watch(self.grow()))
        self.roots, self.gradients = self.choose_roots()

    def layer(self, x: Tensor) -> Tensor:
        p, choice = self.parameters, self.choice
        bias = choice.choice([*p.biases, None])
        return OPS[choice.choice(ACTIVATIONS)].call(x, choice.choice(p.weights), bias)

    def grow(self) -> Tensor:
        choice = self.choice
        # mostly from the newest, so that there are chains
        x = self.made[-1] if choice.random() < 0.6 else choice.choice(self.made)
        other = choice.choice(self.made)
        kind = choice.random()
        if kind < 0.7:
            return self.layer(x)
        plain = [
            lambda: x * other,
            lambda: x + other,
            lambda: F.linear(x, choice.choice(self.parameters.weights)).cos(),
            lambda: x.detach() * 0.5 + other,
            lambda: x.view(-1).view(x.shape),
            lambda: OPS[choice.choice(ACTIVATIONS)].call(x, other.t() @ other * 0.1),
            lambda: OPS[choice.choice(ACTIVATIONS)].call(
                x, choice.choice(self.parameters.weights), other[0]
            ),
            lambda: x.sum() * other,
        ]
        return choice.choice(plain)()

    def watch(self, y: Tensor) -> Tensor:
        kind = self.choice.random()
        if not y.requires_grad:
            return y
        if kind < 0.05:
            y.register_hook(lambda g: self.seen.append(g.clone()))
        elif kind < 0.10:
            y.register_hook(lambda g: g.cos())
        elif kind < 0.13:
            y.retain_grad()
            self.retained.append(y)
        elif kind < 0.16 and y.grad_fn is not None:
            y.grad_fn.register_prehook(lambda grads: self.seen.append(grads[0].clone()))
        elif kind < 0.19 and y.grad_fn is not None:
            y.grad_fn.register_hook(
                lambda gi, go: self.seen.extend(g.clone() for g in (*gi, *go) if g is not None)
            )
        return y

    def choose_roots(self) -> tuple[list[Tensor], list[Tensor]]:
        made = [y for y in self.made[len(self.parameters.inputs) :] if y.requires_grad]
        roots = made[-1:]
        while made and self.choice.random() < 0.75:
            roots.append(self.choice.choice(made))
        roots = list({id(root): root for root in roots}.values())
        return roots, [root.detach().sin() for root in roots]

    def run(self) -> list[Tensor | None]:
        """All gradients and all that was seen of them."""
        if not self.roots:
            return []
        wanted = list(self.parameters.leaves)
        inside = [y for y in self.made if y.grad_fn is not None]
        if inside and self.choice.random() < 0.15:
            wanted.append(self.choice.choice(inside))
        results: list[Tensor | None] = []
        again = self.choice.random() < 0.2
        options = {"allow_unused": True, "retain_graph": True}
        for _ in range(1 + again):
            results += torch.autograd.grad(self.roots, wanted, self.gradients, **options)
        seen = sorted(self.seen, key=lambda g: (g.shape, g.sum().item()))
        return results + seen + [y.grad for y in self.retained]


def scaled(results: list[Tensor | None]) -> list[Tensor | None]:
    """Products of products grow; what is compared is brought to magnitude 1."""
    return [t if t is None else t / (1 + t.abs().max()) for t in results]


def test_two_thousand_graphs():
    parameters = Parameters()
    with tfl.handover(False):
        want = [scaled(Graph(parameters, seed).run()) for seed in range(GRAPHS)]
    barrier = threading.Barrier(THREADS)

    def work(thread: int) -> None:
        barrier.wait()
        for seed in range(thread, GRAPHS, THREADS):
            got = scaled(Graph(parameters, seed).run())
            assert_same(got, want[seed], f"graph of seed {seed}, in thread {thread}:")

    with tfl.explain() as report, ThreadPoolExecutor(THREADS) as pool:
        for finished in [pool.submit(work, thread) for thread in range(THREADS)]:
            finished.result()
    # It is no test of hand-over if none was made, or no reason against one was met.
    assert report.handed_over > GRAPHS, report.handed_over
    met = collections.Counter(call.handover.removeprefix("plain: ") for call in report.calls)
    for reason in ("a hook on the tensor", "a hook on the node", "retain_grad", "another consumer"):
        assert met[reason] > 10, met
    assert met["its gradient was asked for"] > 10, met


def test_the_same_seed_is_the_same_graph():
    parameters = Parameters()
    for seed in range(50):
        assert_same(Graph(parameters, seed).run(), Graph(parameters, seed).run(), f"seed {seed}")


def test_the_comparison_finds_one_wrong_gradient():
    """One of all the results of a graph is off by 10^-9 of its size."""
    parameters = Parameters()
    results = scaled(Graph(parameters, 5).run())
    places = [k for k, t in enumerate(results) if t is not None and t.abs().max() > 0]
    for k in places:
        other = list(results)
        other[k] = other[k] * (1 + 1e-9)
        try:
            assert_same(other, results)
        except AssertionError:
            continue
        raise AssertionError(f"result {k} was not missed")
    assert places
