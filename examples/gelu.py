"""GELU: tanh against erf. How far apart they are, what each costs, and when which is fused.

GELU(z) = z · Φ(z), with the normal distribution's Φ, which is written with erf. Its authors also
gave an approximation with tanh, from the days when erf was slow:

    erf:   z · (1 + erf(z / √2)) / 2                          nn.GELU(), approximate="none"
    tanh:  z · (1 + tanh(√(2/π) (z + 0.044715 z³))) / 2       nn.GELU(approximate="tanh")

They are two functions, up to 4.7e-4 apart, most at z = ±2.7. Beside GELU(2.7) = 2.69 that is less
than fp16 and bf16 can show. Beside GELU(-2.7) = -0.0094 it is a twentieth, which every dtype shows.
A model may well stand the exchange, but it is not the same model. This package therefore never puts
one in the place of the other. Mind the defaults: `FusedLinearGELU` has "tanh", `nn.GELU` "none".

Which one is fused into the product:

    where                  tanh                                   erf
    GPU, fp16 and bf16     GELU_BIAS; in training GELU_AUX_BIAS,  BIAS, then a kernel of ours
                           which also keeps the pre-activation
    GPU, fp32 and fp64     BIAS, then a kernel of ours            BIAS, then a kernel of ours
    CPU, inference         oneDNN, where it is as exact           oneDNN, where it is as exact
    CPU, training          the plain formula                      the plain formula

cuBLASLt has no epilogue with erf; and the tanh in its fp32 epilogue is an approximate one, less
exact than torch's, which is why it is not used there. On a GPU the kernel after the product costs
a pass over the output, and is timed; a CPU's times would be mostly noise.

    python examples/gelu.py
"""

from __future__ import annotations

import math
import signal
from argparse import ArgumentDefaultsHelpFormatter as WithDefaults
from argparse import ArgumentParser
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from torch_fused_linear import explain, linear_gelu
from torch_fused_linear.timing import Contender, clock_for, measure

KINDS = {"tanh": "tanh", "erf": "none"}  # by the names that `approximate` has for them
COLOURS = {"tanh": "#e69f00", "erf": "#0072b2"}  # told apart by the colour-blind as well
EPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def compare_curves() -> dict[str, Tensor]:
    """Both functions, and their derivatives, in double precision."""
    z = torch.linspace(-6, 6, 12001, dtype=torch.float64, requires_grad=True)
    curves = {"z": z.detach()}
    for name, approximate in KINDS.items():
        y = F.gelu(z, approximate=approximate)
        curves[name] = y.detach()
        (curves[f"{name}'"],) = torch.autograd.grad(y.sum(), z)
    return curves


def largest_differences(curves: dict[str, Tensor]) -> dict:
    """The largest difference of the functions and of their derivatives, and its |z|."""
    differences = {}
    for name, derivative in (("value", ""), ("derivative", "'")):
        apart = (curves[f"tanh{derivative}"] - curves[f"erf{derivative}"]).abs()
        where = int(apart.argmax())
        differences[name] = (float(apart[where]), abs(float(curves["z"][where])))
        print(f"tanh and erf differ by up to {apart[where]:.2e} in {name}, at |z| = "
              f"{differences[name][1]:.2f}")  # fmt: skip
    for z in (2.7, -2.7):
        true = float(F.gelu(torch.tensor(z, dtype=torch.float64)))
        ulps = {
            str(dtype)[6:]: differences["value"][0]
            / (eps * 2.0 ** math.floor(math.log2(abs(true))))
            for dtype, eps in EPS.items()
        }
        differences[f"ulps at {z}"] = ulps
        spoken = ", ".join(f"{ulp:.2g} of {name}" for name, ulp in ulps.items())
        print(f"  at z = {z}, where GELU is {true:.3g}, in units of the last place: {spoken}")
    return differences


def what_runs(tokens: int, sizes: tuple[int, int], device: str) -> dict[tuple[str, str], str]:
    """The path of each kind and dtype, for inference and training, as explain names it."""
    paths = {}
    print("\nwhat runs:")
    for dtype in EPS:
        x = torch.randn(tokens, sizes[0], device=device, dtype=dtype)
        w = torch.randn(sizes[1], sizes[0], device=device, dtype=dtype) / sizes[0] ** 0.5
        b = torch.zeros(sizes[1], device=device, dtype=dtype)
        for name, approximate in KINDS.items():
            for mode, wanted in (("inference", False), ("training", True)):
                with explain() as report:
                    linear_gelu(x, w.requires_grad_(wanted), b, approximate=approximate)
                path = report.calls[0].path
                paths[f"{name} {str(dtype)[6:]}", mode] = path
                print(f"  {name:4} {str(dtype)[6:]:8} {mode:9} {path}")
    return paths


def contenders_for(x: Tensor, w: Tensor, b: Tensor) -> list[Contender]:
    """Both kinds, fused and plain."""

    def plain(kind: str) -> Tensor:
        return F.gelu(F.linear(x, w, b), approximate=kind)

    def fused(kind: str) -> Tensor:
        return linear_gelu(x, w, b, approximate=kind)

    return [
        Contender(f"{name} {way.__name__}", partial(way, kind))
        for name, kind in KINDS.items()
        for way in (plain, fused)
    ]


def time_kinds(tokens: int, sizes: tuple[int, int], device: str, seconds: float) -> dict[str, dict]:
    """Microseconds per inference call in fp32 and bf16: fused and plain, of both kinds."""
    times: dict[str, dict] = {}
    print(f"\n{sizes[0]} → {sizes[1]}, {tokens} tokens, microseconds per call without gradients:")
    dtypes = (torch.float32, torch.bfloat16)
    for dtype in tqdm(dtypes, "timing", leave=False, disable=None):
        x = torch.randn(tokens, sizes[0], device=device, dtype=dtype)
        w = torch.randn(sizes[1], sizes[0], device=device, dtype=dtype) / sizes[0] ** 0.5
        contenders = contenders_for(x, w, torch.zeros(sizes[1], device=device, dtype=dtype))
        numbers, _ = measure(contenders, clock_for(x.device), seconds)
        found = times[str(dtype)[6:]] = {name: number.median for name, number in numbers.items()}
        spoken = ", ".join(f"{name} {time:.0f}" for name, time in found.items())
        tqdm.write(f"  {str(dtype)[6:]:8} {spoken}")
    return times


def draw(path: Path, curves: dict[str, Tensor], times: dict[str, dict], where: str) -> None:
    from matplotlib.figure import Figure

    count = 3 if times else 2
    figure = Figure(figsize=(4.7 * count, 4.4), dpi=130, layout="constrained")
    shapes, errors, *bars = figure.subplots(1, count)
    z = curves["z"].numpy()
    for name, colour in COLOURS.items():
        style = {"color": colour, "linewidth": 1.5 if name == "erf" else 5}
        shapes.plot(z, curves[name].numpy(), label=f"with {name}", **style)
    shapes.set(title="The two GELUs: by eye they are one", xlim=(-4, 2), ylim=(-0.4, 2))
    shapes.set(xlabel="z, what the linear layer gives", ylabel="GELU(z)")
    for label, derivative, style in (("of GELU", "", "-"), ("of its derivative", "'", "--")):
        apart = curves[f"tanh{derivative}"] - curves[f"erf{derivative}"]
        errors.plot(z, 1e4 * apart.numpy(), style, color="#009e73" if style == "-" else "#cc79a7",
                    label=label)  # fmt: skip
    errors.set(title="How far apart they are: tanh minus erf", xlabel="z")
    errors.set(ylabel="difference, in ten-thousandths", ylim=(-10, 14))
    for axes in bars:
        draw_times(axes, times)
        axes.set(title=f"Inference, {where}", ylabel="microseconds")
    for axes in (shapes, errors, *bars):
        axes.legend(frameon=False, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def draw_times(axes, times: dict[str, dict]) -> None:
    ways = [(kind, way) for kind in KINDS for way in ("plain", "fused")]
    for offset, (kind, way) in enumerate(ways):
        heights = [found[f"{kind} {way}"] for found in times.values()]
        at = [k + 0.2 * offset for k in range(len(times))]
        style = {"color": COLOURS[kind], "alpha": 0.45 if way == "plain" else 1.0}
        drawn = axes.bar(at, heights, 0.18, label=f"{way}, {kind}", **style)
        axes.bar_label(drawn, [f"{height:.0f}" for height in heights], fontsize=8)
    axes.set_xticks([k + 0.3 for k in range(len(times))], list(times))
    axes.margins(y=0.45)  # room for the legend


def main(arguments: list[str] | None = None) -> dict:
    """Runs the example; -> its numbers."""
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=WithDefaults)
    add = parser.add_argument
    add("--out", type=Path, default=Path("example_pictures"), help="folder for the picture")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    add("--seconds", type=float, default=1.0, help="of measuring, for each dtype")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)

    on_gpu = given.device != "cpu"
    tokens, sizes = (8192, (768, 3072)) if on_gpu else (512, (128, 512))
    curves = compare_curves()
    differences = largest_differences(curves)
    paths = what_runs(tokens, sizes, given.device)
    times = time_kinds(tokens, sizes, given.device, given.seconds) if on_gpu else {}
    path = given.out / "gelu.png"
    draw(path, curves, times, f"{sizes[0]} → {sizes[1]}, {tokens} tokens, {given.device}")
    print(path)
    return {"differences": differences, "paths": paths, "times": times}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback
    main()
