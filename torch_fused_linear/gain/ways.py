"""A model in each way that is compared: eager, after fuse_, compiled, compiled with our pass."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..fuse import fuse_, unfuse_
from ..graph.options import compile_options
from ..timing import Call, Contender

EAGER, FUSED, COMPILED, OURS = "eager", "fuse_", "torch.compile", "compile_options()"
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def floats(output: Any) -> list[Tensor]:
    return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


def loss_of(output: Any) -> Tensor:
    """The loss that an output names, or the mean of what is in it, which stands for one."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return sum(t.float().mean() for t in floats(output)) if loss is None else loss


class Ways:
    """Copies of a model, which is left as it is, and its inputs."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        loss: Callable[[Any], Tensor],
    ) -> None:
        self.plain = copied(model)
        unfuse_(self.plain)
        shared = {id(parameter): parameter for parameter in self.plain.parameters()}
        self.fused = copied(self.plain, shared)  # parameters of another copy might not fit
        self.report = fuse_(self.fused)
        self.loss = loss
        self.inputs = tree_map(own, (tuple(args), dict(kwargs)))
        given = [t for t in tree_leaves(self.inputs) if isinstance(t, Tensor)]
        tensors = [*self.plain.parameters(), *given]
        self.leaves = [t for t in tensors if t.requires_grad]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.training = [module.training for module in self.plain.modules()]
        self.buffers = [(b, b.clone()) for each in self.copies for b in each.buffers()]
        self.replaced: Counter[str] = Counter()  # by our pass, in what was compiled last

    @property
    def copies(self) -> tuple[nn.Module, nn.Module]:
        return self.plain, self.fused

    def set_mode(self, step: bool) -> None:
        """A step trains in the mode that the model was in, if it was in training."""
        for each in self.copies:
            each.train(step)
            if step and self.training[0]:
                for module, training in zip(each.modules(), self.training):
                    module.training = training

    def call(self, name: str, step: bool) -> Call:
        model = self.fused if name == FUSED else self.plain

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.loss(model(*args, **kwargs)) if step else model(*args, **kwargs)

        run = forward
        if name == COMPILED:
            run = torch.compile(with_own_code(forward), dynamic=False)
        elif name == OURS:
            options = compile_options(conv=any("Conv2d" in b.before for b in self.report.fused))
            self.replaced = options["pre_grad_custom_pass"].replaced
            run = torch.compile(with_own_code(forward), dynamic=False, options=options)
        args, kwargs = self.inputs

        def train() -> None:
            for leaf in self.leaves:
                leaf.grad = None
            run(*args, **kwargs).backward()

        return train if step else lambda: run(*args, **kwargs)

    def contender(self, name: str, step: bool) -> Contender:
        return Contender(name, self.call(name, step), torch.enable_grad if step else torch.no_grad)

    def result(self, contender: Contender, step: bool, seed: int = 0) -> list[Tensor]:
        """What a call gives: outputs, or of a step the gradients."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for buffer, value in self.buffers:
                buffer.copy_(value)
        with contender.conditions():
            output = contender.call()
        return [t.grad for t in self.leaves if t.grad is not None] if step else floats(output)

    def peak(self, contender: Contender) -> int:
        """Bytes that a call takes at most beyond those in use before, gradients among them."""
        for leaf in self.leaves:
            leaf.grad = None
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        with contender.conditions():
            contender.call()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    @contextlib.contextmanager
    def nudged(self) -> Iterator[None]:
        """Each weight with its last binary digit the other way, of those that products read."""
        weights = [p.detach() for p in self.plain.parameters() if p.is_floating_point()]

        def flip() -> None:
            for weight in weights:
                bit = 1 << max(0, digits(weight.dtype) - self.digits_of_products())
                weight.view(BITS[weight.element_size()]).bitwise_xor_(bit)

        flip()
        try:
            yield
        finally:
            flip()

    def digits_of_products(self) -> int:
        kind = self.device.type
        if torch.is_autocast_enabled(kind):
            return digits(torch.get_autocast_dtype(kind))
        backends = torch.backends.cuda.matmul, torch.backends.cudnn.conv
        is_tf32 = kind == "cuda" and any(b.fp32_precision == "tf32" for b in backends)
        return 10 if is_tf32 else digits(torch.float64)


def with_own_code(function: FunctionType) -> FunctionType:
    """The compiler keeps its graphs by code, and after some of one code runs eager instead."""
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, closure=function.__closure__)


def copied(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as failure:
        raise TypeError(f"gain: expected a model that can be copied: {failure}") from failure


def own(value: Any) -> Any:
    """An input whose gradient and whose memory are nobody else's."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def digits(dtype: torch.dtype) -> int:
    return round(-math.log2(torch.finfo(dtype).eps))


def distance(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The root mean square of the difference over that of what is wanted."""

    def norm(tensors: Sequence[Tensor]) -> float:
        norms = (torch.linalg.vector_norm(t, dtype=torch.float64).item() for t in tensors)
        return math.hypot(*norms)

    difference = norm([one - other for one, other in zip(got, wanted, strict=True)])
    return difference / norm(wanted) if difference else 0.0
