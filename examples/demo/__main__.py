"""Watch a network of fused layers learn to read images beside the same plain PyTorch network.

    python -m examples.demo
    python -m examples.demo --dataset mnist --data DIR
    python -m examples.demo --dataset fashion-mnist --data DIR
    python -m examples.demo --recipe tutorial --data DIR

Both networks start from the same weights and see the same batches in the same order; they take
turns, and only their training steps are timed. Two pictures are left behind, `demo_loss.png` and
`demo_predictions.png`. Ctrl-C ends the training early, still leaves the pictures, and exits with
130 as shells report it.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from examples.demo.data import DATASETS, DataError, Dataset, load
from examples.demo.training import (
    RECIPES,
    TUTORIAL_LAST_PRINTED_BATCH,
    TUTORIAL_PUBLISHED,
    Learner,
    Settings,
    build_learners,
    layer_sizes,
    steps_per_epoch,
    train,
    warm_up,
)
from torch_fused_linear._command_line import (
    EXIT_BAD_USAGE,
    EXIT_INTERRUPTED,
    OneLineParser,
    chosen_device,
    output_directory,
    positive,
    seed_number,
)


def parse(arguments: Sequence[str] | None) -> Settings:
    """Read the command line; bad arguments end the program with one line."""
    parser = OneLineParser(
        prog="python -m examples.demo",
        description="Train fused layers beside nn.Linear on images of digits or clothes, and draw "
        "what they learned.",
        epilog="examples:\n"
        "  python -m examples.demo                    digits, about ten seconds\n"
        "  python -m examples.demo --activation gelu --dtype bfloat16\n"
        "  python -m examples.demo --recipe tutorial --dataset fashion-mnist --data DIR",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--recipe",
        choices=RECIPES,
        default="mlp",
        help="mlp (the default), or tutorial: the 784-30-10 network of nvmath-python's notebook",
    )
    add("--dataset", choices=DATASETS, help="default: digits; mnist for the tutorial")
    add("--data", type=Path, default=Path("data"), help="folder of MNIST's files; default: data")
    add(
        "--activation",
        choices=("relu", "gelu"),
        default="relu",
        help="of the hidden layers; default: relu; gelu is the tanh form",
    )
    add(
        "--epochs",
        type=positive(int),
        help="passes over the data; default: 20; mnist 5; tutorial 1",
    )
    add("--batch-size", type=positive(int), help="images a step; default: 32; tutorial 256")
    add("--lr", type=positive(float), help="learning rate of SGD; default: 0.02; tutorial 0.1")
    add("--seed", type=seed_number, default=1234, help="of weights and order; default: 1234")
    add("--device", help="cpu, cuda or cuda:N; default: a GPU if there is one")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        default="float32",
        help="default: float32; half precision goes through torch.autocast",
    )
    add("--out", type=Path, default=Path(), help="folder for the two pictures; default: this one")
    given = parser.parse_args(arguments)

    recipe = RECIPES[given.recipe]
    dataset = given.dataset or recipe.dataset
    try:
        return Settings(
            recipe_name=given.recipe,
            dataset=dataset,
            data=given.data,
            activation=given.activation,
            epochs=given.epochs or recipe.epochs[dataset],
            batch_size=given.batch_size or recipe.batch_size,
            lr=given.lr or recipe.lr,
            seed=given.seed,
            device=chosen_device(given.device),
            dtype=getattr(torch, given.dtype),
            out=output_directory(given.out),
        )
    except ValueError as error:
        parser.error(str(error))


def say(text: str = "") -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def network_name(settings: Settings, data: Dataset) -> str:
    activation = "ReLU" if settings.activation == "relu" else "GELU (tanh)"
    return f"{'-'.join(map(str, layer_sizes(settings, data)))} with {activation}"


def precision_name(settings: Settings) -> str:
    name = str(settings.dtype).removeprefix("torch.")
    if not settings.autocast:
        return name
    scaler = " with GradScaler" if settings.dtype is torch.float16 else ""
    return f"{name} by torch.autocast{scaler}, parameters float32"


def introduce(settings: Settings, data: Dataset) -> None:
    """Say what is about to be trained, and head the table."""
    recipe = settings.recipe
    height, width = data.image_shape
    say(
        f"data     {data.title}: {len(data.train_labels)} training and {len(data.test_labels)} "
        f"test images of {height}x{width}"
    )
    say(f"network  {network_name(settings, data)}; fused layers beside nn.Linear")
    say(
        f"training {recipe.loss_name}, SGD lr {settings.lr:g} momentum {recipe.momentum:g}, "
        f"batch {settings.batch_size}, seed {settings.seed}"
    )
    say(f"device   {device_name(settings.device)}; {precision_name(settings)}")
    if settings.recipe_name == "tutorial" and settings.dataset != "mnist":
        what = "its smaller likeness" if settings.dataset == "digits" else "on other images"
        say(f"note     the tutorial's network is 784-30-10 on MNIST; this is {what}")
    say()
    say(f"{'':5}  {'mean loss':^19}  {'test accuracy':^19}  {'seconds so far':>17}")
    say("epoch" + 3 * f"  {'fused':>8}  {'nn.Linear':>9}")


def epoch_row(epoch: int, steps: int, learners: Sequence[Learner]) -> str:
    """One row of the table: loss, accuracy and seconds, each for both networks."""
    means = [sum(learner.losses[-steps:]) / steps for learner in learners]
    accuracies = [100 * learner.accuracies[-1][1] for learner in learners]
    seconds = [learner.seconds for learner in learners]
    return (
        f"{epoch:5d}  {means[0]:8.4f}  {means[1]:9.4f}  {accuracies[0]:6.2f} %  "
        f"{accuracies[1]:7.2f} %  {seconds[0]:8.3f}  {seconds[1]:9.3f}"
    )


def summarise(learners: tuple[Learner, Learner]) -> None:
    """Say how close the two networks stayed and what each took."""
    fused, plain = learners
    pairs = list(zip(fused.losses, plain.losses, strict=False))
    say()
    if all(math.isfinite(loss) for pair in pairs for loss in pair):
        apart = max(abs(one - other) for one, other in pairs)
        equal = "equal in every batch, to the last bit; " if apart == 0 else ""
        say(f"losses   {equal}never more than {apart:.1e} apart in any batch")
    else:
        say("losses   not finite: the training went astray, a smaller --lr may help")
    # Whatever else the machine does hits single turns; the median of the turns does not see it.
    steps = [median(learner.step_seconds) for learner in learners]
    speed = median(b / a for a, b in zip(fused.step_seconds, plain.step_seconds, strict=False))
    say(f"time     {fused.seconds:.3f} s fused, {plain.seconds:.3f} s nn.Linear")
    say(
        f"a step   {1e6 * steps[0]:.0f} us fused, {1e6 * steps[1]:.0f} us nn.Linear: "
        f"fused has {speed:.2f} times the speed (medians of {len(fused.step_seconds)} turns)"
    )


def conclude(settings: Settings) -> None:
    """What was shown by this and what was not, where the times alone might mislead."""
    say("\nshown    fused layers learn what nn.Linear and its activation learn, up to rounding")
    if settings.device.type == "cpu":
        say("not      speed: fusing saves little on a CPU, and more on a GPU, in larger layers")
    else:
        say("not      the speed of large layers: in networks this small the CPU sets the pace")
    say("speed    python -m benchmarks layer; measured: docs/performance.md")


def compare_with_tutorial(learners: tuple[Learner, Learner], settings: Settings) -> None:
    """The three numbers that the tutorial prints, beside what it published for MNIST."""
    last = min(TUTORIAL_LAST_PRINTED_BATCH, min(len(learner.losses) for learner in learners) - 1)
    names = ("loss at batch 0", f"loss at batch {last}", "test accuracy")
    ours = [(it.losses[0], it.losses[last], it.accuracies[0][1]) for it in learners]
    comparable = settings.dataset == "mnist"
    say()
    say(
        f"{'as the tutorial prints it':25}  {'fused':>8}  {'nn.Linear':>9}"
        + (f"  {'published':>9}" if comparable else "")
    )
    for name, fused, plain, published in zip(names, *ours, TUTORIAL_PUBLISHED, strict=True):
        say(
            f"{name:25}  {fused:8.4f}  {plain:9.4f}" + (f"  {published:9.4f}" if comparable else "")
        )


def draw(learners: tuple[Learner, Learner], settings: Settings, data: Dataset) -> None:
    """Write both pictures and say where."""
    from examples.demo import pictures

    steps = steps_per_epoch(settings, data)
    curves = [
        pictures.Curve(
            learner.name,
            [(step + 1) / steps for step in range(len(learner.losses))],
            learner.losses,
            [step / steps for step, _ in learner.accuracies],
            [accuracy for _, accuracy in learner.accuracies],
        )
        for learner in learners
    ]
    what = f"{network_name(settings, data)}, {data.title}"
    loss_path = settings.out / "demo_loss.png"
    predictions_path = settings.out / "demo_predictions.png"
    pictures.draw_learning(
        loss_path,
        f"Fused layers beside nn.Linear: {what}",
        settings.recipe.loss_name,
        curves,
    )
    pictures.draw_predictions(
        predictions_path,
        f"What the fused network reads: {what}",
        data.test_images.reshape(-1, *data.image_shape).float().cpu().numpy(),
        learners[0].predict(data.test_images).cpu().numpy(),
        data.test_labels.cpu().numpy(),
        data.classes,
    )
    say(f"pictures {loss_path.resolve()}\n         {predictions_path.resolve()}")


def report(learners: tuple[Learner, Learner], settings: Settings, data: Dataset) -> None:
    """Everything that is said and drawn after the training, whole or cut short."""
    for learner in learners:
        if not learner.accuracies or learner.accuracies[-1][0] != len(learner.losses):
            learner.test(data)
    summarise(learners)
    if settings.recipe_name == "tutorial":
        compare_with_tutorial(learners, settings)
    draw(learners, settings, data)
    if all(math.isfinite(learner.losses[-1]) for learner in learners):
        conclude(settings)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Finish what is inside: a second Ctrl-C would leave half a picture."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def run(settings: Settings) -> int:
    """Load, build, train, report; the exit status."""
    data = load(settings.dataset, settings.data).to(settings.device, settings.parameter_dtype)
    steps = steps_per_epoch(settings, data)
    introduce(settings, data)
    warm_up(settings, data)
    learners = build_learners(settings, data)
    status = 0
    try:
        train(learners, settings, data, lambda epoch: say(epoch_row(epoch, steps, learners)))
    except KeyboardInterrupt:
        if not all(learner.losses for learner in learners):
            raise
        status = EXIT_INTERRUPTED
    with undisturbed():
        if status == EXIT_INTERRUPTED:
            say(f"\nstopped by Ctrl-C after {len(learners[0].losses)} batches, learned so far:")
        report(learners, settings, data)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """The program: parse, run, and turn what can go wrong into a line for the user."""
    try:
        return run(parse(arguments))
    except DataError as error:
        print(f"demo: {error}", file=sys.stderr)
        return EXIT_BAD_USAGE
    except ModuleNotFoundError as error:
        print(
            f"demo: {error.name} is not installed; the demo needs "
            "pip install scikit-learn matplotlib tqdm",
            file=sys.stderr,
        )
        return EXIT_BAD_USAGE
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C before anything was learned", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
