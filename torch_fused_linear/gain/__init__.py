"""``gain`` measures what fusing brings a model; ``python -m torch_fused_linear.gain`` does the
same.
"""

import copy
import math
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from .._support.arguments import check_module
from .._support.torch_internals import floats_in
from ..fuse import fuse_, unfuse_
from ..graph.options import compile_options
from ..policy import set_policy
from ..timing import Contender, clock_for, measure
from .result import COMPILED, EAGER, FUSED, LARGEST, OURS, Gain, Mode

__all__ = ["Gain", "Mode", "gain"]

PRODUCT = re.compile(r"mm|linear|convolution")
BACKWARD = "autograd::engine::evaluate_function"


def loss_of(output: Any) -> Tensor:
    """Returns the loss that an output names, or as a stand-in the mean of its tensors."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return sum(t.float().mean() for t in floats_in(output)) if loss is None else loss


def gain(
    model: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] = loss_of,
    step: bool = False,
    compile: bool = False,
    linear: bool = False,
    seconds: float = 5.0,
    progress: bool = True,
) -> Gain:
    """Measures what :func:`fuse_` and :func:`compile_options` bring a model.

    It runs copies, so the model, its gradients and buffers, the inputs and the random state stay as
    they are. All ways take turns. A way is called faster only if the quartiles of its rounds are
    further from those of the other way than they are from each other.

    Args:
        model: the model, on the device and in the dtype to measure. Its parameters are copied once.
        inputs, kwargs: the arguments that it is called with, by position and by keyword.
        loss: computes the loss of the output, for the step. Default: the ``loss`` that the output
            has, or the mean of all floating-point tensors in it.
        step: also measure a training step: loss and all gradients, without an optimizer.
        compile: also measure ``torch.compile``, without and with our pass. This may take minutes.
        linear: fuse the model with ``fuse_(linear=True)``.
        seconds: how long to time each mode, or longer until there are nine rounds.
        progress: report progress on standard error.

    Returns:
        The measurements. They can be printed, and drawn by ``save_picture(path)``; ``verdict`` is a
        sentence.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``, was scripted, traced or exported, or it or an
            input cannot be copied.
        ValueError: ``seconds`` is not above zero, or the output has no floating-point tensor.
        Exception: any exception of the model itself.

    Examples::

        >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> found = gain(model, torch.randn(16, 8), seconds=0.1, progress=False)
        >>> "inference" in found.modes
        True
    """
    model = getattr(model, "_orig_mod", model)  # of a compiled model, what was compiled
    check_module("gain", model)
    if not seconds > 0:
        raise ValueError(f"gain: seconds must be above zero, got {seconds}")
    fuse_(model, dry_run=True)  # raises what it is for whatever is not a model
    modes, state = {}, random.getstate()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        for name in ("inference", *["step"] * step):
            copies = Copies(model, inputs, kwargs or {}, loss, name == "step", linear)
            try:
                if copies.report.fused or compile:
                    modes[name] = measured(copies, compile, seconds, name if progress else "")
            finally:
                unfuse_(copies.models[FUSED])
                random.setstate(state)
    device = torch.cuda.get_device_name(copies.device) if copies.device.type == "cuda" else "CPU"
    return Gain(copies.report, f"{device}, {copies.dtype}".replace("torch.", ""), modes)


def measured(copies: "Copies", compile: bool, seconds: float, progress: str) -> Mode:
    ways = [EAGER, *[FUSED] * bool(copies.report.fused), *[COMPILED, OURS] * compile]
    contenders = {way: copies.contender(way) for way in ways}
    copies.results(contenders[EAGER])  # raises what the model itself raises
    if progress:
        print(f"gain: {progress}: {', '.join(ways)}", file=sys.stderr, flush=True)
    times, failed = measure(list(contenders.values()), clock_for(copies.device), seconds)
    mode = Mode(times=times, failed=failed)
    if FUSED in times:
        mode.share, mode.most = share_of(contenders[FUSED], copies.device)
    if copies.device.type == "cuda":
        mode.memory = {way: copies.peak(contenders[way]) for way in times}
    mode.rounding, mode.apart = copies.compare([contenders[way] for way in times])
    return mode


class Copies:
    """A copy of a model and its inputs for each way. All share the parameters of the first."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence,
        kwargs: Mapping,
        loss: Callable,
        step: bool,
        linear: bool = False,
    ) -> None:
        self.step, self.loss = step, loss
        try:
            plain, self.args, self.kwargs = copy.deepcopy((model, tuple(args), dict(kwargs)))
        except (RuntimeError, TypeError) as failure:
            raise TypeError(f"gain: expected what can be copied: {failure}") from failure
        unfuse_(plain)
        if not (step and plain.training):  # else parts that are frozen stay so
            plain.train(step)
        shared = {id(parameter): parameter for parameter in plain.parameters()}
        ways = (EAGER, FUSED, COMPILED, OURS)
        self.models = {way: copy.deepcopy(plain, dict(shared)) for way in ways}
        self.report = fuse_(self.models[FUSED], linear=linear)
        read = [*plain.parameters(), *floats_in((self.args, self.kwargs)), torch.empty(0)]
        self.leaves = [t for t in read if t.requires_grad]
        self.device, kind = read[0].device, read[0].device.type
        is_cast = torch.is_autocast_enabled(kind)
        self.dtype = torch.get_autocast_dtype(kind) if is_cast else read[0].dtype

    def contender(self, way: str) -> Contender:
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = model(*args, **kwargs)
            return self.loss(output) if self.step else output

        def train() -> None:
            for leaf in self.leaves:
                leaf.grad = None
            run(*self.args, **self.kwargs).backward()

        model, run = self.models[way], forward
        if way in (COMPILED, OURS):
            # The compiler keeps its graphs by code, and after some of one code runs eager instead.
            code = forward.__code__.replace()
            run = FunctionType(code, forward.__globals__, closure=forward.__closure__)
            options = compile_options() if way == OURS else None
            run = torch.compile(run, dynamic=False, options=options)
        if self.step:
            return Contender(way, train, torch.enable_grad)
        return Contender(way, lambda: run(*self.args, **self.kwargs), torch.no_grad)

    def results(self, contender: Contender, seed: int = 0) -> list[Tensor]:
        """Returns the outputs of a call, or the gradients of a step."""
        torch.manual_seed(seed)
        random.seed(seed)
        with contender.conditions():
            output = contender.call()
        grads = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
        found = grads if self.step else floats_in(output)
        if not found:
            raise ValueError("gain: expected an output with a floating-point tensor, got none")
        return found

    def compare(self, contenders: Sequence[Contender]) -> tuple[float, dict[str, float]]:
        """Returns how far eager's results differ if weights move by their rounding, and how far
        the others' differ from eager's. It changes the parameters.
        """
        eager, *others = contenders
        wanted = self.results(eager)
        reseeded = distance(self.results(eager, seed=1), wanted)
        apart = {each.name: distance(self.results(each), wanted) for each in others}
        with torch.no_grad():
            for p in self.models[EAGER].parameters():
                if p.is_floating_point():
                    p.mul_(1 + max(self.eps, torch.finfo(p.dtype).eps) * torch.randint_like(p, 2))
        rounding = distance(self.results(eager), wanted)
        if reseeded > LARGEST * rounding:  # compiled, dropout draws other numbers than in eager
            apart = {way: far for way, far in apart.items() if way == FUSED}
        return rounding, apart

    @property
    def eps(self) -> float:
        """The rounding of products: TF32 has fewer digits than its dtype."""
        has_convolutions = any(isinstance(m, nn.Conv2d) for m in self.models[EAGER].modules())
        backend = torch.backends.cudnn.conv if has_convolutions else torch.backends.cuda.matmul
        is_tf32 = self.device.type == "cuda" and backend.fp32_precision == "tf32"
        return max(2.0**-10 * is_tf32, torch.finfo(self.dtype).eps)

    def peak(self, contender: Contender) -> int:
        """Bytes that a call takes at most beyond those in use before, gradients among them."""
        for leaf in self.leaves:
            leaf.grad = None
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        with contender.conditions():
            contender.call()
        return torch.cuda.max_memory_allocated(self.device) - before


def distance(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The root mean square of the difference over that of what is wanted."""

    def norm(tensors: Iterable[Tensor]) -> float:
        return math.hypot(*(torch.linalg.vector_norm(t.double()).item() for t in tensors))

    difference = norm(one - other for one, other in zip(got, wanted, strict=True))
    return difference / (norm(wanted) or 1.0)


def share_of(fused: Contender, device: torch.device) -> tuple[float, float]:
    """The part of a call's time in what can be fused, as torch's profiler sees it, and how many
    times as fast the call were if only products took time there.

    Under the policy ``"eager"`` each fused operator is eager's own operators, and the profiler has
    them under its name.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    with set_policy("eager"), fused.conditions():
        fused.call()
        with profile(activities=activities, acc_events=True) as seen:
            fused.call()
            if on_gpu:
                torch.cuda.synchronize(device)

    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CPU]
    ours = {e.id: e for root in events if root.name.startswith("fused::") for e in tree(root)}
    # A node of the backward has the number of the operator in the forward that made it.
    numbers = {e.sequence_nr for e in ours.values() if e.sequence_nr >= 0}
    for event in events:
        if event.name.startswith(BACKWARD) and event.sequence_nr in numbers:
            ours |= {e.id: e for e in tree(event)}

    def time(events: Iterable[Any]) -> float:
        return sum(e.self_device_time_total if on_gpu else e.self_cpu_time_total for e in events)

    total, fusable = time(events), time(ours.values())
    left = total - fusable + time(e for e in ours.values() if PRODUCT.search(e.name))
    return (fusable / total, total / left) if left else (0.0, 1.0)


def tree(event: Any) -> Iterable[Any]:
    yield event
    for child in event.cpu_children:
        yield from tree(child)
