"""Random cases of the operators: their errors against fp64, beside eager's.

An error is e / (u * sum |a_k b_k| + u * |bias|), by the same rule through a chain of layers; u is
half of epsilon. The root mean square of it over a result is what is compared. A case counts against
one side where that is more than 1.25 times the other's plus a tenth of the rounding of the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor

import torch_fused_linear as tfl
from certify import fuzz_cases, parts
from certify.fuzz_cases import Bare, Case
from certify.parts import Found
from certify.record import add
from torch_fused_linear import plans

ALLOWED, SLACK = 1.25, 0.1
POOLED = 1.1  # over all cases together there is no room for luck
FAR = 8.0  # so many times eager's error is a wrong result, whatever the statistics say,
LUCK = 1.0  # unless it is so small that eager's was a lucky number
NO_YARDSTICK = 1e3  # more roundings than that in eager's result: it is wrong, and says nothing
EXACT = 4.0  # what fp64, which has no better reference, is held to
KNOWN = "known: no gradient at a NaN of ReLU under policy cublaslt"


def results(call, tensors: list[Tensor], grad: Tensor, case: Case, adds=False) -> list[Tensor]:
    """The output, and the gradient of each tensor that wants one. Where gradients are there
    already, products add to them if ``adds`` says so, else torch does."""
    if case.mode != "grad":
        return [call(tensors)]
    leaves = [t.detach().requires_grad_(w) for t, w in zip(tensors, case.wanted)]
    wanted = [t for t in leaves if t.requires_grad]
    output = call(leaves)
    if not wanted:
        assert not output.requires_grad
        return [output]
    if case.calls_backward:
        for t in wanted if case.added_to == "float32" else []:
            t.grad_dtype = torch.float32 if t.itemsize == 2 else t.dtype
        with tfl.accumulate_gradients(wanted) if adds else contextlib.nullcontext():
            output.backward(grad, retain_graph=bool(case.added_to))
            if case.added_to:
                output.backward(grad)
        return [output.detach(), *(t.grad for t in wanted)]
    return [output.detach(), *torch.autograd.grad(output, wanted, grad)]


def names(case: Case) -> list[str]:
    if case.mode != "grad":
        return ["output"]
    parameters = ["grad_weight" if t.dim() > 1 else "grad_bias" for t in case.tensors[1:]]
    found = ["grad_input", *parameters]
    return ["output", *(name for name, wanted in zip(found, case.wanted) if wanted)]


def of_ours(case: Case) -> list[Tensor]:
    def call(tensors: list[Tensor]) -> Tensor:
        return fuzz_cases.ours(case, *case.with_tensors(tensors))

    with fuzz_cases.settings(case):
        return results(call, case.tensors, case.grad, case, adds=bool(case.added_to))


def of_plain(case: Case, change, mode=contextlib.nullcontext) -> list[Tensor]:
    def call(tensors: list[Tensor]) -> Tensor:
        with mode():
            return fuzz_cases.plain(*case.with_tensors(tensors))

    with torch.set_grad_enabled(case.mode == "grad"):
        tensors = [change(t) for t in case.tensors]
        return results(call, tensors, change(case.grad), case)


def of_eager(case: Case) -> tuple[list[Tensor], bool]:
    """In the layouts at hand, or contiguous where eager refuses those; and whether it did."""
    try:
        return of_plain(case, lambda t: t), False
    except RuntimeError:
        return of_plain(case, Tensor.contiguous), True


def wide(t: Tensor) -> Tensor:
    return t.double().contiguous()


def error_sizes(mine: Tensor, theirs: Tensor, exact: Tensor, scale: Tensor) -> list[float]:
    """Sums of squares of our error, eager's and one rounding of the result, and the largest."""
    info = torch.finfo(mine.dtype)
    unit = (scale * (info.eps / 2)).clamp_min(info.smallest_normal * info.eps)
    columns = torch.stack([mine.double() - exact, theirs.double() - exact, exact * (info.eps / 2)])
    columns = (columns / unit).flatten(1)
    return torch.cat([columns.square().sum(1), columns.abs().amax(1)]).tolist()


class Trial(parts.Trial):
    def __init__(self, device: str, measured: bool) -> None:
        super().__init__(device, measured)
        warnings.simplefilter("ignore")
        torch.backends.cudnn.allow_tf32 = False
        plans.budget(200 if measured else 0)

    def one(self, seed: int, unit: int) -> Found:
        case = fuzz_cases.Draw(seed, unit, self.device).case()
        found = judged(case)
        if not found.get("failures"):
            return found
        on_cpu = self.device == "cpu"
        differs = eager_reads_unwritten(seed, unit) if on_cpu else eager_differs(case)
        return {"eager differs from call to call": 1} if differs else found

    def plain(self, seed: int, unit: int) -> None:
        """Plain torch alone, which may end the process; prints what its bits amount to."""
        found, _ = of_eager(fuzz_cases.Draw(seed, unit, self.device).case())
        print(hashlib.sha256(b"".join(map(bits, found))).hexdigest())

    @staticmethod
    def verdict(found: Found, device: str = "cpu") -> list[str]:
        """Ours may not be the worse one more often than eager is (three standard deviations of
        tossing a coin are allowed), nor its error over all cases above 1.1 times eager's."""
        wrong = []
        for policy, dtypes in found.get("by", {}).items():
            for dtype, counts in dtypes.items():
                ours, eager = counts["ours worse"], counts["eager worse"]
                if ours - eager > 3 * math.sqrt(ours + eager):
                    wrong.append(f"{policy}, {dtype}: ours worse {ours} times, eager {eager} times")
                if dtype == "float64":
                    continue
                for name, sums in counts["results"].items():
                    ratio = ratio_of(sums)
                    if sums["elements"] >= 2048 and ratio > POOLED:
                        wrong.append(f"{policy}, {dtype}, {name}: {ratio:.3f} times eager's error")
        return wrong


class Yardstick:
    """The results that a case is compared with: eager's, exact ones, and the scale of errors."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.eager, self.is_refused = of_eager(case)
        self.exact = of_plain(case, wide)
        self.scale = of_plain(case, lambda t: wide(t).abs(), Bare)

    def judged(self, mine: list[Tensor]) -> Found:
        found: Found = {"failures": [], "worse": {}, "results": {}}
        columns = (names(self.case), mine, self.eager, self.exact, self.scale)
        for name, *tensors in zip(*columns, strict=True):
            add(found, judged_result(self.case, name, *tensors))
        return found

    def wrong(self, mine: list[Tensor]) -> str:
        return "; ".join(self.judged(mine)["failures"])


def judged(case: Case) -> Found:
    """The findings of a case; see the module's text."""
    yardstick = Yardstick(case)
    try:
        mine = of_ours(case)
    except Exception as error:
        if yardstick.is_refused and case.policy == "eager":  # the same operators, the same error
            return {"refused as by eager": 1}
        return {"failures": [f"{type(error).__name__}: {error}".split("\n")[0] + f" in {case}"]}
    found = yardstick.judged(mine)
    failures, worse = found.pop("failures"), found.pop("worse")
    counts = {"cases": 1, "results": found.pop("results")}
    counts |= {words: int(words in worse) for words in ("ours worse", "eager worse")}
    return {
        **found,
        "failures": [f"{text} in {case}" for text in failures],
        "by": {case.policy: {str(case.x.dtype)[6:]: counts}},
        "operators": {layer.op.name: 1 for layer in case.layers},
        "not finite on purpose": int(not case.is_finite),
    }


def judged_result(case: Case, name: str, a: Tensor, b: Tensor, c: Tensor, s: Tensor) -> Found:
    """Compares one result: ours, eager's, the exact one, and the scale of its errors."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        text = f"{name} is {a.dtype} {tuple(a.shape)}, {b.dtype} {tuple(b.shape)}"
        return {"failures": [text]}
    if not a.numel():
        return {}
    edge = either_is_right(a, b, c, s)
    found: Found = {"infinite or the largest number": int(edge.any())}
    a, b, c = (t.masked_fill(edge, 0) for t in (a, b, c))
    if not (case.is_finite and bool(b.isfinite().all())):
        if not all(torch.equal(f(a), f(b)) for f in (torch.isnan, torch.isinf)):
            if loses_nan(case):
                return found | {KNOWN: 1}
            return found | {"failures": [f"{name}: not finite elsewhere than eager's"]}
        return found
    if not bool(a.isfinite().all()):
        return found | {"failures": [f"{name}: not finite where eager's is"]}
    words, numbers = compared(a, b, c, s, case.longest_sum if case.is_systematic else EXACT)
    if b.dtype != torch.float64 and numbers[2] > NO_YARDSTICK**2 * numbers[0]:
        return found | {"results of eager that are wrong": 1}
    if "wrong" in words:
        found["failures"] = [f"{name}: {words}"]
    if not case.is_systematic:
        found["results"] = {name: dict(zip(("elements", "ours", "eager"), numbers))}
    return found | {"worse": {words: 1}}


def either_is_right(mine: Tensor, theirs: Tensor, exact: Tensor, scale: Tensor) -> Tensor:
    """Where one is infinite and the other is not, of a number as near the dtype's largest as
    roundings go."""
    info = torch.finfo(mine.dtype)
    near = (exact.abs() - info.max).abs() <= FAR * info.eps / 2 * scale
    return near & (mine.isinf() & theirs.isfinite() | theirs.isinf() & mine.isfinite())


def eager_differs(case: Case) -> bool:
    """Returns whether eager gives other bits, or numbers that are not finite, from call to call."""
    first, _ = of_eager(case)
    for _ in range(20):
        leave_nan(case.x)
        again, _ = of_eager(case)
        for look in (Tensor.isnan, Tensor.nan_to_num):
            if not all(torch.equal(look(a), look(b)) for a, b in zip(first, again)):
                return True
    return False


def bits(t: Tensor) -> bytes:
    return t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def eager_reads_unwritten(seed: int, unit: int) -> bool:
    """Returns whether eager, in processes of its own, gives other bits when the memory that it is
    given is filled with another byte."""
    command = [sys.executable, str(Path(__file__).parent), "fuzz", "--device", "cpu"]
    command += ["--seed", str(seed), "--plain", str(unit)]
    found = set()
    for byte in (None, 0x7F, 0xFE):
        filled = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
        filled |= {"MALLOC_PERTURB_": str(byte ^ 0xFF)} if byte else {}
        run = subprocess.run(command, capture_output=True, env={**os.environ, **filled})
        found.add((run.returncode, run.stdout))
    return len(found) > 1


def leave_nan(like: Tensor) -> None:
    """In memory that is then free, for those who read what nobody wrote."""
    sizes = [*range(16, 4096, 48), *(1 << k for k in range(12, 20))]
    [like.new_full((size,), math.nan) for size in sizes for _ in range(4)]


def loses_nan(case: Case) -> bool:
    """The bit mask that policy cublaslt keeps has no bit for a NaN, whose gradient torch passes."""
    relu = any(layer.op.activation == "relu" for layer in case.layers)
    return case.policy == "cublaslt" and not case.is_finite and relu and case.mode == "grad"


def compared(
    mine: Tensor, theirs: Tensor, exact: Tensor, scale: Tensor, roundings: float = EXACT
) -> tuple[str, list]:
    """A fault in words, or nothing; and the numbers that are added up over all cases."""
    count = mine.numel()
    if mine.dtype == torch.float64:
        exact = theirs.double()
    *sums, most, most_eager, most_size = error_sizes(mine, theirs, exact, scale)
    ours, eager, size = (math.sqrt(s / count) for s in sums)
    numbers = [count, sums[0], sums[1]]
    if mine.dtype == torch.float64:
        limit = max(EXACT, roundings) * (1 + size)
        return (f"wrong: error {ours:.3g} of fp64's rounding" if ours > limit else ""), numbers
    slack = SLACK * size
    far = ours > LUCK and ours > FAR * (eager + size)
    if far or (most > 5 * LUCK and most > FAR * (most_eager + most_size)):
        text = f"wrong: error {ours:.3g}, eager's {eager:.3g}, largest {most:.3g}, {most_eager:.3g}"
        return text, numbers
    if ours > ALLOWED * eager + slack:
        return "ours worse", numbers
    return ("eager worse" if eager > ALLOWED * ours + slack else ""), numbers


def ratio_of(sums: dict) -> float:
    return math.sqrt(sums["ours"] / sums["eager"]) if sums["eager"] else float(sums["ours"] > 0)
