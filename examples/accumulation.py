"""Four micro-batches a step, with gradients in fp32: torch adds them, or the product does.

Memory often holds only a part of the batch that training wants, which then comes in parts, the
micro-batches, whose gradients are added up before the optimizer runs. In bf16 a sum of many would
lose the small ones, so they are kept in fp32 (`Tensor.grad_dtype`). Torch takes two kernels:

    product:  dW = dyᵀ x, rounded to bf16                writes 2 bytes an element
    sum:      .grad += dW                                reads 2 + 4, writes 4

After `accumulate_gradients` there is one, cuBLASLt's product with beta = 1:

    product:  .grad = dyᵀ x + .grad, in fp32             reads 4, writes 4

Two copies of a small network see the same data, one trained in the first way, one in the other.
The losses agree as far as roundings go. On a GPU the time of a step is printed; on a CPU, where
both ways are the same product, it would say nothing.

    python examples/accumulation.py
"""

from __future__ import annotations

import copy
import signal
import time
from argparse import ArgumentDefaultsHelpFormatter as WithDefaults
from argparse import ArgumentParser

import torch

import torch_fused_linear as tfl

MICRO_BATCHES = 4
LEARNING_RATE = 0.2


def make_network(width: int, device: str) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        tfl.FusedLinearGELU(width, 4 * width),
        tfl.FusedLinearGELU(4 * width, width),
        tfl.FusedLinear(width, width),
    ).to(device, torch.bfloat16)


def train(network: torch.nn.Module, data: torch.Tensor) -> tuple[list[float], float]:
    """The losses, and the seconds that a step takes once plans are made."""
    losses, start = [], time.perf_counter()
    for number, batch in enumerate(data):
        if number == 1:
            if batch.is_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
        for part in batch.chunk(MICRO_BATCHES):
            loss = (network(part) - part.sin()).float().square().sum(-1).mean() / MICRO_BATCHES
            loss.backward()
            losses.append(loss.detach())
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
        network.zero_grad()
    if data.is_cuda:
        torch.cuda.synchronize()
    return torch.stack(losses).tolist(), (time.perf_counter() - start) / max(len(data) - 1, 1)


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=WithDefaults)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="where it runs")
    parser.add_argument("--width", type=int, default=64, help="of the network")
    parser.add_argument("--tokens", type=int, default=256, help="of a step, in four parts")
    parser.add_argument("--steps", type=int, default=20, help="of the optimizer")
    args = parser.parse_args(arguments)
    torch.manual_seed(1)
    data = torch.randn(args.steps, args.tokens, args.width).to(args.device, torch.bfloat16)

    by_torch = make_network(args.width, args.device)
    in_product = copy.deepcopy(by_torch)
    for parameter in by_torch.parameters():
        parameter.grad_dtype = torch.float32
    losses, seconds = train(by_torch, data)
    with tfl.accumulate_gradients(in_product, dtype=torch.float32), tfl.explain() as report:
        ours, our_seconds = train(in_product, data)

    added = sum(call.operator == "_weight_gradient" for call in report.calls)
    print(f"{added} gradients written or added where they are made in {args.steps} steps")
    print("first and last loss, torch adds: ", f"{losses[0]:.4f} {losses[-1]:.4f}")
    print("first and last loss, products do:", f"{ours[0]:.4f} {ours[-1]:.4f}")
    if data.is_cuda:
        print(f"a step: {seconds * 1e3:.2f} ms, {our_seconds * 1e3:.2f} ms")
    return {"torch": losses, "products": ours, "added": [added]}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback
    main()
