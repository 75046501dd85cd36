"""Compares a fused model with the plain one, in everything that can be asked of a model."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import tree_changes
from torch import Tensor, nn
from trees import Tree

import torch_fused_linear as tfl


@dataclass
class Outcome:
    """The results of a run: named tensors, values that hooks saw, and exceptions."""

    values: dict[str, Tensor | None] = field(default_factory=dict)
    log: list = field(default_factory=list)
    raised: type | None = None
    where: str = "forward"
    message: str = ""


@contextlib.contextmanager
def recorded(outcome: Outcome) -> Iterator[None]:
    tree_changes.LOG.clear()
    torch.default_generator.manual_seed(7)
    try:
        yield
    except Exception as error:
        outcome.raised, outcome.message = type(error), f"{type(error).__name__}: {error}"[:600]
    outcome.values["random state"] = torch.get_rng_state().double()
    outcome.log = list(tree_changes.LOG)


def step(model: Callable, x: Tensor, owner: nn.Module, training: bool) -> Outcome:
    """One training step; the gradients of input and parameters, and the buffers afterwards."""
    outcome = Outcome()
    owner.train(training)
    owner.zero_grad()
    leaf = x.clone().requires_grad_(x.is_floating_point())
    with recorded(outcome):
        y = outcome.values["output"] = model(leaf * 1)
        outcome.where = "backward"
        if y.requires_grad:
            weights = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).reshape(y.shape)
            y.backward(weights.to(y.dtype))
        outcome.values["gradient of the input"] = leaf.grad
        for name, p in owner.named_parameters():
            outcome.values[f"gradient of {name}"] = p.grad
        outcome.values |= {name: b.clone() for name, b in owner.named_buffers()}
    return outcome


def inference(model: Callable, x: Tensor, owner: nn.Module, context=torch.no_grad) -> Outcome:
    outcome = Outcome()
    owner.eval()
    with recorded(outcome), context():
        outcome.values["output"] = model(x.clone())
    return outcome


def size(t: Tensor) -> float:
    finite = t.detach().double()[t.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def close(got: Tensor, want: Tensor, tolerance: float, least: float) -> bool:
    """Returns whether they differ by less than `tolerance` times the largest value or `least`."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    got, want = got.detach().double(), want.detach().double()
    scale = max(size(want), least)
    return torch.allclose(got, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def assert_same(got: Outcome, want: Outcome, what: str, tolerance: float = 1e-9) -> None:
    """Where the plain model fails in its backward, the fused one may succeed."""
    if got.raised is not None or (want.raised is not None and want.where == "forward"):
        errors = f"raised {got.message or 'nothing'}, plain {want.message or 'nothing'}"
        assert got.raised is want.raised, f"{what}: {errors}"
    # Values that cancel, as a bias's gradient before a batch normalisation, are rounding errors.
    sizes = [size(t) for n, t in want.values.items() if t is not None and n != "random state"]
    least = 1e-5 * max(sizes, default=0.0)
    for name, theirs in want.values.items():
        if want.raised is not None and name == "random state":
            continue
        ours = got.values.get(name)
        assert (ours is None) == (theirs is None), f"{what}: {name} is {ours}, plain {theirs}"
        if theirs is None:
            continue
        tol = tolerance if theirs.dtype == torch.float64 else max(tolerance, 1e-4)
        assert close(ours, theirs, tol, least), f"{what}: {name}\n{ours}\nplain\n{theirs}"
        assert ours.requires_grad == theirs.requires_grad, f"{what}: {name}.requires_grad"
    if want.raised is None:
        assert [kind for kind, _ in got.log] == [kind for kind, _ in want.log], f"{what}: hooks"
        for (kind, ours), (_, theirs) in zip(got.log, want.log):
            assert [s for s, _ in ours] == [s for s, _ in theirs], f"{what}: hook {kind}"
            sums = [torch.tensor([v for _, v in side]) for side in (ours, theirs)]
            assert torch.allclose(*sums, 1e-6, 1e-6, equal_nan=True), f"{what}: hook {kind} saw"


def assert_runs_the_same(fused: nn.Module, plain: nn.Module, x: Tensor, what: str) -> None:
    assert_same(step(fused, x, fused, True), step(plain, x, plain, True), f"{what}, training")
    assert_same(inference(fused, x, fused), inference(plain, x, plain), f"{what}, inference")


# Systems that take a model: each gets both models and compares, or returns False if the plain one
# cannot be taken -------------------------------------------------------------------------------


def attempt(make: Callable):
    """The result, or the error that it raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return make()
        except Exception as error:
            return error


def is_same(got: Outcome, want: Outcome) -> bool:
    return attempt(lambda: assert_same(got, want, "")) is None


def transformed(make: Callable, run: Callable, fused, plain, x, what) -> bool:
    """Makes something of both models and compares; a plain model that fails is no test."""
    theirs = attempt(lambda: make(plain))
    if isinstance(theirs, Exception):
        return False
    want = run(theirs, x, plain)
    ours = attempt(lambda: make(fused))
    assert not isinstance(ours, Exception), f"{what}: {type(ours).__name__}: {ours}"
    assert_same(run(ours, x, fused), want, what)
    return True


def compiled(backend: str) -> Callable:
    def check(fused, plain, x) -> bool:
        # The plain model runs as it is first; compiled only where the fused one differs from it.
        def make(model):
            torch._dynamo.reset()
            return torch.compile(model, backend=backend)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = [copy.deepcopy(m.state_dict()) for m in (fused, plain)]
            want = step(plain, x, plain, True)
            got = step(make(fused), x, fused, True)
            if not is_same(got, want):
                fused.load_state_dict(state[0])
                plain.load_state_dict(state[1])
                eager, want = want, step(make(plain), x, plain, True)
                if want.raised is not None or not is_same(want, eager):
                    # torch.compile alone changes the model: its counters ran in tracing too, say.
                    return False
                assert_same(got, want, f"compiled by {backend}")
        return want.raised is None

    return check


def scripted(fused, plain, x) -> bool:
    def make(model):
        # Else a class that was scripted before takes no notice of what is patched now.
        torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
        return torch.jit.script(model.eval())

    return transformed(make, inference, fused, plain, x, "scripted")


def exported(fused, plain, x) -> bool:
    def make(model):
        return torch.export.export(model.eval(), (x,)).module()

    return transformed(make, inference, fused, plain, x, "exported")


def copied(way: Callable) -> Callable:
    def check(fused, plain, x) -> bool:
        def run(other, x, owner):
            return step(other, x, other, True)

        if not transformed(way, run, fused, plain, x, way.__name__):
            return False
        other = way(fused)
        tfl.unfuse_(other)
        assert_runs_the_same(other, way(plain), x, f"{way.__name__}, then unfuse_")
        return True

    return check


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def under(context: Callable, tolerance: float = 1e-9) -> Callable:
    def check(fused, plain, x) -> bool:
        outcomes = [inference(model, x, model, context) for model in (fused, plain)]
        assert_same(*outcomes, context.__name__, tolerance)
        return outcomes[1].raised is None

    return check


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def narrow(fused, plain, x) -> bool:
    assert_same(*(step(m.float(), x.float(), m, True) for m in (fused, plain)), "float32", 1e-4)
    return True


def fused_again(fused, plain, x) -> bool:
    tfl.fuse_(fused)
    tfl.fuse_(fused)
    assert_runs_the_same(fused, plain, x, "fused twice")
    tfl.unfuse_(fused)
    tfl.fuse_(fused)
    assert_runs_the_same(fused, plain, x, "fused again after unfuse_")
    return True


SYSTEMS: dict[str, Callable[[nn.Module, nn.Module, Tensor], bool]] = {
    "deepcopy": copied(copy.deepcopy),
    "pickle": copied(pickled),
    "autocast": under(autocast, 0.05),
    "inference mode": under(torch.inference_mode),
    "float32": narrow,
    "again": fused_again,
    "script": scripted,
    "export": exported,
    "compile eager": compiled("eager"),
    "compile aot_eager": compiled("aot_eager"),
}


def check(tree: Tree, system: str | None = None) -> int:
    """Raises AssertionError where the fused model differs; how many blocks were fused if not."""
    plain, model = tree.build(plain=True), tree.build()
    children = list(model.children())
    root = children[tree.seed % len(children)] if tree.part and children else model
    before = [(*named, type(named[1])) for named in all_modules(model)]
    blocks = len(tfl.fuse_(root, **tree.options()).fused)
    assert before == [(*named, type(named[1])) for named in all_modules(model)]
    worlds = [tree_changes.world(tree.world, library) for library in (tree.library, tree.plain)]
    with worlds[0], worlds[1]:
        for m in (plain, model):
            tree_changes.apply(tree.after, m)
        assert_runs_the_same(model, plain, tree.x, "fused")
        tried = SYSTEMS[system](model, plain, tree.x) if system else True
        tfl.unfuse_(model)
        if tried and system not in ("again", "float32"):  # which leave the two out of step
            assert_runs_the_same(model, plain, tree.x, "after unfuse_")
        kinds = [[(n, type(m).__name__) for n, m in all_modules(net)] for net in (model, plain)]
        assert kinds[0] == kinds[1] and not tfl.is_fused(model)
    return blocks if tried else -1


def all_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules(remove_duplicate=False))
