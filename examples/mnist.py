"""MNIST with fused layers: the tutorial network of nvmath-python, 784-30-10, step by step.

NVIDIA's tutorial (notebooks 02_epilogs and 03_backpropagation) writes a network's training step as
matrix products, and then lets each product do what follows it, as its *epilogue*:

    step                     unfused                                    epilogue
    hidden layer             h = relu(x @ w1.T + b1)                    RELU_BIAS
    .. keeping what the      mask = z1 >= 0                             RELU_AUX_BIAS
       backward needs
    output layer             z2 = h @ w2.T + b2                         BIAS
    loss's gradient          dz2 = (sigmoid(z2) - target) / batch       -
    its weight and bias      dw2 = dz2.T @ h; db2 = dz2.sum(0)          BGRADB
    back through the ReLU    dz1 = (dz2 @ w2) * mask; db1 = dz1.sum(0)  DRELU_BGRAD
    the first weight         dw1 = dz1.T @ x                            -

Here nothing of this is written by hand. `FusedMLP` is a module as any, and `loss.backward()` takes
the right-hand column by itself: both layers are one operator, whose backward applies the ReLU and
sums the first bias gradient with the second layer's product. By default the library's epilogues
are used where they are also the fastest and keep torch's semantics; `set_policy("cublaslt")` takes
the column literally. `explain` says which it was.

The middle column is in this file too, as `unfused_step`, and is trained beside the fused network
from the same weights on the same batches: both learn the same.

    python examples/mnist.py                 scikit-learn's 8x8 digits: 64-30-10
    python examples/mnist.py --data FOLDER   MNIST, by torchvision, which keeps it in the folder

With MNIST the tutorial publishes a loss of 0.6833 at the first batch and 0.0566 at batch 220, and
an accuracy of 0.9146 after one epoch. The digits fill five batches only, so they are gone through
until as many batches have been seen as one epoch of MNIST has.
"""

from __future__ import annotations

import signal
from argparse import ArgumentDefaultsHelpFormatter as WithDefaults
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.nn.functional as F
from digits.data import Dataset, load_digits, load_mnist
from digits.networks import CLASSES, LAST_PRINTED, PUBLISHED, build_networks, sigmoid_loss
from torch import Tensor, nn
from tqdm import tqdm

from torch_fused_linear import explain, set_policy

HIDDEN, BATCH, LR, SEED = 30, 256, 0.1, 1234
STEPS = 60000 // BATCH  # of one epoch of MNIST, whose last, incomplete batch the tutorial drops
TEST_EVERY = 26


def unfused_step(x: Tensor, labels: Tensor, parameters: list[Tensor]) -> Tensor:
    """One training step with each operation on its own; the epilogue that does it stands beside."""
    w1, b1, w2, b2 = parameters
    target = F.one_hot(labels, CLASSES).to(x.dtype)

    z1 = x @ w1.T
    z1 = z1 + b1  # BIAS ...
    h = z1.relu()  # ... and RELU: together RELU_BIAS
    mask = z1 > 0  # AUX: RELU_AUX_BIAS writes it as one bit each (there 0 counts as positive)
    z2 = h @ w2.T
    z2 = z2 + b2  # BIAS
    output = z2.sigmoid()  # of this and the loss no epilogue knows
    loss = F.binary_cross_entropy(output, target, reduction="sum") / len(x)

    dz2 = (output - target) / len(x)
    dw2 = dz2.T @ h
    db2 = dz2.sum(0)  # BGRADB, an epilogue of the product before
    dz1 = dz2 @ w2
    dz1 = dz1 * mask  # DRELU ...
    db1 = dz1.sum(0)  # ... and BGRAD: together DRELU_BGRAD
    dw1 = dz1.T @ x

    for parameter, gradient in zip(parameters, (dw1, db1, dw2, db2), strict=True):
        parameter -= LR * gradient
    return loss


def autograd_step(x: Tensor, labels: Tensor, network: nn.Module) -> Tensor:
    """A step with layers, fused ones or plain, in ordinary PyTorch."""
    loss = sigmoid_loss(network(x), labels)
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            parameter -= LR * gradient
    return loss.detach()


def accuracy_of(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, data: Dataset) -> float:
    """How many test images are read right, as a part of all."""
    with torch.no_grad():
        read = F.linear(F.linear(data.test_images, w1, b1).relu(), w2, b2).argmax(1)
    return float((read == data.test_labels).double().mean())


def train(network: nn.Module, unfused: list[Tensor], data: Dataset) -> tuple[dict, dict]:
    """Both through the same batches, in the order of the file. -> losses, accuracies"""
    whole = len(data.train_labels) // BATCH * BATCH
    losses, accuracies = ({"fused": [], "unfused": []} for _ in range(2))
    for step in tqdm(range(STEPS), "training", leave=False, disable=None):
        batch = slice(step * BATCH % whole, step * BATCH % whole + BATCH)
        x, labels = data.train_images[batch], data.train_labels[batch]
        losses["fused"].append(autograd_step(x, labels, network))
        losses["unfused"].append(unfused_step(x, labels, unfused))
        if (step + 1) % TEST_EVERY == 0:
            accuracies["fused"].append(accuracy_of(*network.parameters(), data))
            accuracies["unfused"].append(accuracy_of(*unfused, data))
    # Trained on the sum over the ten outputs, shown as their mean, as the tutorial does.
    shown = {name: (torch.stack(some) / CLASSES).tolist() for name, some in losses.items()}
    return shown, accuracies


def show_what_ran(network: nn.Module, data: Dataset) -> list[str]:
    """A step under both policies, as `explain` saw it; -> the operators that ran under "auto"."""
    x, labels = data.train_images[:BATCH], data.train_labels[:BATCH]
    operators: list[str] = []
    for policy in ("auto", "cublaslt"):
        with set_policy(policy), explain() as report:
            sigmoid_loss(network(x), labels).backward()
        network.zero_grad(set_to_none=True)
        print(f'\nwhat ran in one step, set_policy("{policy}"):\n{report}')
        operators = operators or [call.operator for call in report.calls]
    if not x.is_cuda:
        print("A CPU has no such epilogues; the operators are the same.")
    return operators


def time_steps(fused: nn.Module, plain: nn.Module, unfused: list[Tensor], data: Dataset) -> dict:
    """Microseconds per step of each, in turns: the median over rounds."""
    from torch_fused_linear.timing import Contender, clock_for, measure

    x, labels = data.train_images[:BATCH], data.train_labels[:BATCH]
    calls = [
        Contender("fused layers", lambda: autograd_step(x, labels, fused)),
        Contender("nn.Linear and nn.ReLU", lambda: autograd_step(x, labels, plain)),
        Contender("unfused, without autograd", lambda: unfused_step(x, labels, unfused)),
    ]
    numbers, _ = measure(calls, clock_for(x.device), seconds=0.5)
    return {name: number.median for name, number in numbers.items()}


def draw(out: Path, losses: dict, accuracies: dict, read: Tensor, data: Dataset) -> list[Path]:
    from digits import pictures

    paths = [out / f"mnist_{name}.png" for name in ("loss", "predictions")]
    epochs = [step / (len(data.train_labels) // BATCH) for step in range(1, STEPS + 1)]
    tested = epochs[TEST_EVERY - 1 :: TEST_EVERY]
    curves = [pictures.Curve(n, epochs, losses[n], tested, accuracies[n]) for n in losses]
    pictures.draw_learning(paths[0], data.title, "binary cross-entropy", *curves)
    images = data.test_images.reshape(-1, *data.image_shape)
    shown = [tensor.cpu().numpy() for tensor in (images, read, data.test_labels)]
    pictures.draw_predictions(paths[1], data.title, *shown)
    return paths


def main(arguments: list[str] | None = None) -> dict:
    """Runs the example; -> its numbers."""
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=WithDefaults)
    add = parser.add_argument
    add("--data", type=Path, help="where torchvision keeps MNIST; else scikit-learn's digits")
    add("--out", type=Path, default=Path("example_pictures"), help="folder for the pictures")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)

    data = load_mnist(given.data) if given.data else load_digits()
    data = data.to(torch.device(given.device), torch.float32)
    sizes = [data.train_images.shape[1], HIDDEN, CLASSES]
    network, plain = (net.to(given.device) for net in build_networks(sizes, SEED))
    unfused = [parameter.detach().clone() for parameter in network.parameters()]
    words = "-".join(map(str, sizes))
    print(f"{data.title}, {words}, batches of {BATCH}, {STEPS} steps\n{network}")

    operators = show_what_ran(network, data)
    losses, accuracies = train(network, unfused, data)
    read = network(data.test_images).detach().argmax(1)
    accuracy = accuracy_of(*network.parameters(), data)
    apart = max(abs(a - b) for a, b in zip(losses["fused"], losses["unfused"], strict=True))
    ours = (losses["fused"][0], losses["fused"][LAST_PRINTED], accuracy)
    print(f"\n{'':14} {'first loss':>14} {f'batch {LAST_PRINTED}':>14} {'accuracy':>14}")
    print(f"{'fused':>14}" + "".join(f" {number:14.4f}" for number in ours))
    if given.data:
        print(f"{'published':>14}" + "".join(f" {number:14.4f}" for number in PUBLISHED))
    print(f"fused and unfused losses are never more than {apart:.1e} apart")
    if given.device == "cpu":
        print("steps are not timed: on a CPU a network as small as this gains nothing")
    else:
        times = time_steps(network, plain, unfused, data)
        print("a step: " + ", ".join(f"{some:.0f} us {name}" for name, some in times.items()))
    print(*draw(given.out, losses, accuracies, read, data), sep="\n")
    found = {"losses": losses, "accuracies": accuracies, "operators": operators}
    return found | {"accuracy": accuracy, "apart": apart}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback
    main()
