"""A backward pass by hand, with the operators that autograd is made of, checked against autograd.

Two layers, h = relu(x w1ᵀ + b1) and y = h w2ᵀ + b2, with the loss mean((y - t)²) / 2. The chain
rule, from the loss down, with dz for the gradient of what goes into an activation:

    dy  = (y - t) / y.numel()
    dw2 = dyᵀ h          db2 = Σ dy           of the second layer
    dz1 = (dy w2) · relu'                      through its input and the ReLU before it
    dw1 = dz1ᵀ x         db1 = Σ dz1           of the first layer

Three operators do this (`csrc/fused_linear.h` has the same in C++, as `fused::steps`):

- `torch.ops.fused._linear_aux(x, w, b, RELU)` is the forward that also writes what the backward
  needs of the ReLU: one bit for each element, set where the pre-activation is >= 0. That is
  cuBLASLt's RELU_AUX_BIAS. Rows are padded to 128 bits; bit o % 8 of byte o // 8 is feature o.
- `torch.ops.fused._linear_backward_across(...)` is the backward of the second layer, and on along
  the edge to the first: dw2 and db2, and in the step of dy w2 also relu' and the sum of db1. That
  is cuBLASLt's DRELU_BGRAD, which reads the mask.
- `torch.ops.fused._linear_backward(...)` is the backward of one layer alone; gradients that are not
  wanted (here that of x) are tensors of no elements.

`_activation_backward` is the piece between them, relu' and the sum in one pass over memory: with
it the same can be done layer by layer, which is the second way below.

A mask instead of an output has a price: torch's ReLU has gradient 0 where the pre-activation is
exactly 0, the library's bit says 1. So `loss.backward()` reads ReLU's output by default, and the
mask under `set_policy("cublaslt")` only. By hand you choose: every operator here takes either, as
`saved`. The last part shows the difference.

    python examples/backward_by_hand.py
"""

from __future__ import annotations

import signal
from argparse import ArgumentDefaultsHelpFormatter as WithDefaults
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fused_linear import explain, set_policy
from torch_fused_linear.activations import NUMBERS

fused = torch.ops.fused
NONE, RELU = NUMBERS["none"], NUMBERS["relu"]
NAMES = ("w1", "b1", "w2", "b2")


def across(x: Tensor, target: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor):
    """The ReLU's part of the backward in the second layer's step. -> y, mask, gradients"""
    h, mask = fused._linear_aux(x, w1, b1, RELU)  # RELU_AUX_BIAS
    y = fused.linear(h, w2, b2)  # BIAS

    dy = (y - target) / y.numel()
    # The second layer has no activation of its own (NONE, nothing saved); relu is the one before.
    dz1, dw2, db2, db1 = fused._linear_backward_across(
        dy, h, w2, None, NONE, [True, True, True], mask, RELU, True
    )  # DRELU_BGRAD for dz1 and db1
    # The activation is dealt with and db1 is known, so dw1 is all that is left.
    _, dw1, _ = fused._linear_backward(dz1, x, w1, None, NONE, [False, True, False])
    return y, mask, (dw1, db1, dw2, db2)


def layer_by_layer(x: Tensor, target: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor):
    """Each layer for itself, with a pass over memory between. -> y, mask, gradients"""
    h, mask = fused._linear_aux(x, w1, b1, RELU)
    y = fused.linear(h, w2, b2)

    dy = (y - target) / y.numel()
    dh, dw2, db2 = fused._linear_backward(dy, h, w2, None, NONE, [True, True, True])
    dz1, db1 = fused._activation_backward(dh, mask, RELU, True)
    _, dw1, _ = fused._linear_backward(dz1, x, w1, None, NONE, [False, True, False])
    return y, mask, (dw1, db1, dw2, db2)


def by_autograd(x: Tensor, target: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    """The gradients as torch finds them for the plain formula, in double precision."""
    leaves = [parameter.double().requires_grad_() for parameter in parameters]
    w1, b1, w2, b2 = leaves
    y = F.linear(F.linear(x.double(), w1, b1).relu(), w2, b2)
    loss = (y - target.double()).square().mean() / 2
    return torch.autograd.grad(loss, leaves)


def unpack(mask: Tensor, features: int) -> Tensor:
    """The mask's bits as booleans [*, features]."""
    bits = mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=mask.device) & 1
    return bits.flatten(-2)[..., :features].bool()


def errors(gradients: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> dict[str, float]:
    """The largest error of each gradient, as a part of the largest element."""
    return {
        name: float((mine - true).abs().max() / true.abs().max())
        for name, mine, true in zip(NAMES, gradients, truth, strict=True)
    }


def gradient_at_zero(device: str) -> dict[str, list[float]]:
    """relu' at a pre-activation of -1, exactly 0, and 1, for either `saved`."""
    z = torch.tensor([[-1.0, 0.0, 1.0]], device=device)
    output, mask = fused._linear_aux(z, torch.eye(3, device=device), None, RELU)
    passed = {
        saved: fused._activation_backward(torch.ones_like(z), tensor, RELU, False)[0]
        for saved, tensor in (("output", output), ("mask", mask))
    }
    return {saved: gradient.flatten().tolist() for saved, gradient in passed.items()}


def draw(path: Path, mask: Tensor, features: int, found: dict[str, dict[str, float]]) -> None:
    """A picture of the saved tensors and of the gradients' errors."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    bits = unpack(mask, 8 * mask.shape[-1])[:64].cpu().numpy()
    left.imshow(bits, cmap="Blues", aspect="auto", interpolation="nearest", vmin=-0.2)
    left.axvline(features - 0.5, color="#d55e00", linewidth=1.5)
    left.set(title="ReLU's mask: the padding is right of the line", xlabel="bit", ylabel="row")
    # Points, as a bar on a log axis has no length.
    for colour, (way, error) in zip(("#0072b2", "#e69f00"), found.items()):
        right.plot(list(error.values()), "o", color=colour, markersize=9, alpha=0.8, label=way)
    right.set_xticks(range(len(NAMES)), [f"d{name}" for name in NAMES])
    right.set(title="largest error against autograd in fp64", yscale="log")
    right.set(ylabel="error / largest value")
    right.margins(y=0.3)
    right.legend(frameon=False)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> dict:
    """Runs the example; -> its numbers."""
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=WithDefaults)
    add = parser.add_argument
    add("--out", type=Path, default=Path("example_pictures"), help="folder for the picture")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)

    tokens, size_in, hidden, size_out = 512, 96, 200, 32
    torch.manual_seed(0)
    shapes = [(tokens, size_in), (tokens, size_out)]
    shapes += [(hidden, size_in), (hidden,), (size_out, hidden), (size_out,)]
    # Made on the CPU, so that every device gets the same numbers.
    tensors = [torch.randn(shape).div(shape[-1] ** 0.5).to(given.device) for shape in shapes]
    truth = by_autograd(*tensors)

    found = {}
    # "cublaslt" asks for the library's epilogues by name. A CPU has none, and ignores it.
    with set_policy("cublaslt"):
        for way in (across, layer_by_layer):
            with explain() as report:
                _, mask, gradients = way(*tensors)
            name = way.__name__.replace("_", " ")
            print(f"{name}: {way.__doc__.partition(' ->')[0]}\n{report}")
            found[name] = errors(gradients, truth)
            spoken = ", ".join(f"d{n} {error:.1e}" for n, error in found[name].items())
            print(f"largest errors against autograd in fp64: {spoken}\n")
        at_zero = gradient_at_zero(given.device)

    x, _, w1, b1, *_ = tensors
    right = bool(torch.equal(unpack(mask, hidden), F.linear(x, w1, b1) >= 0))
    output_bytes = tokens * hidden * x.element_size()
    print(
        f"the mask takes {mask.nbytes} bytes, the output {output_bytes}; bits are z >= 0: {right}"
    )
    print("relu' where the pre-activation is -1, 0, 1:")
    for saved, values in at_zero.items():
        print(f"  saved {saved}: {values}")
    path = given.out / "backward_by_hand.png"
    draw(path, mask, hidden, found)
    print(path)
    sizes = {"mask": mask.nbytes, "output": output_bytes}
    return {"errors": found, "mask_is_right": right, "at_zero": at_zero, "bytes": sizes}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback
    main()
