"""What the demo trains: recipes, the fused network and its plain twin, and the training loop."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.demo.data import DataError, Dataset
from torch_fused_linear import FusedLinear, FusedLinearGELU, FusedLinearReLU

CLASSES = 10
BATCHES_PER_TURN = 20

# What the tutorial's notebook prints for MNIST: the loss at the first and the last batch that it
# prints, and the accuracy.
TUTORIAL_LAST_PRINTED_BATCH = 220
TUTORIAL_PUBLISHED = (0.6833, 0.0566, 0.9146)

Batch = tuple[Tensor, Tensor]


def softmax_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of one class out of ten."""
    return F.cross_entropy(logits, labels)


def sigmoid_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of ten sigmoid outputs, summed over them and averaged over the batch.

    The sigmoid is inside the loss, so the gradient of the logits is exactly sigmoid - target.
    """
    targets = F.one_hot(labels, CLASSES).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(labels)


@dataclass(frozen=True)
class Recipe:
    """What is trained and how; `Settings` may overrule the defaults."""

    dataset: str
    hidden: tuple[int, ...]
    epochs: dict[str, int]
    batch_size: int
    lr: float
    momentum: float
    shuffle: bool
    drop_last: bool
    loss: Callable[[Tensor, Tensor], Tensor]
    loss_name: str
    loss_divisor: int  # the loss is trained as it is and shown divided by this


RECIPES = {
    "mlp": Recipe(
        dataset="digits",
        hidden=(512, 256),
        epochs={"digits": 20, "mnist": 5, "fashion-mnist": 5},
        batch_size=32,
        lr=0.02,
        momentum=0.9,
        shuffle=True,
        drop_last=False,
        loss=softmax_loss,
        loss_name="cross-entropy",
        loss_divisor=1,
    ),
    # nvmath-python's notebook 03_backpropagation: nn.Linear's own initialisation, MNIST's usual
    # normalisation, images in the order of the file, incomplete last batch dropped. It trains on
    # the loss summed over the ten outputs and prints their mean. Ours differs in two things: the
    # random numbers behind the initial weights, and testing on all test images (the notebook
    # drops the last 16).
    "tutorial": Recipe(
        dataset="mnist",
        hidden=(30,),
        epochs={"digits": 1, "mnist": 1, "fashion-mnist": 1},
        batch_size=256,
        lr=0.1,
        momentum=0.0,
        shuffle=False,
        drop_last=True,
        loss=sigmoid_loss,
        loss_name="binary cross-entropy",
        loss_divisor=CLASSES,
    ),
}


@dataclass(frozen=True)
class Settings:
    """What the user asked for, checked, with the recipe's defaults filled in."""

    recipe_name: str
    dataset: str
    data: Path
    activation: str
    epochs: int
    batch_size: int
    lr: float
    seed: int
    device: torch.device
    dtype: torch.dtype
    out: Path

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.recipe_name]

    @property
    def autocast(self) -> bool:
        """Half precision trains float32 parameters under torch.autocast."""
        return self.dtype in (torch.bfloat16, torch.float16)

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.float32 if self.autocast else self.dtype


def layer_sizes(settings: Settings, data: Dataset) -> list[int]:
    """Width of the input, of every hidden layer and of the output."""
    return [math.prod(data.image_shape), *settings.recipe.hidden, CLASSES]


def build_networks(sizes: Sequence[int], activation: str, seed: int) -> tuple[nn.Module, nn.Module]:
    """A fused network and its plain twin with the same weights."""
    torch.manual_seed(seed)
    linears = [nn.Linear(wide, narrow) for wide, narrow in itertools.pairwise(sizes)]
    fused_hidden = FusedLinearReLU if activation == "relu" else FusedLinearGELU
    plain: list[nn.Module] = []
    fused: list[nn.Module] = []
    for linear in linears:
        last = linear is linears[-1]
        fused_type = FusedLinear if last else fused_hidden
        fused_layer = fused_type(linear.in_features, linear.out_features)
        fused_layer.load_state_dict(linear.state_dict())
        fused.append(fused_layer)
        plain.append(linear)
        if not last:
            plain.append(nn.ReLU() if activation == "relu" else nn.GELU(approximate="tanh"))
    return nn.Sequential(*fused), nn.Sequential(*plain)


class Learner:
    """A network in training, and the record of how it went."""

    def __init__(self, name: str, network: nn.Module, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.network = network.to(settings.device, settings.parameter_dtype)
        self.optimizer = torch.optim.SGD(
            self.network.parameters(), lr=settings.lr, momentum=settings.recipe.momentum
        )
        self.scaler = torch.amp.GradScaler(
            settings.device.type, enabled=settings.dtype is torch.float16
        )
        self.seconds = 0.0
        self.step_seconds: list[float] = []  # for each turn, the mean of its steps
        self.losses: list[float] = []
        self.accuracies: list[tuple[int, float]] = []  # (steps done, accuracy)

    def learn(self, batches: Sequence[Batch]) -> None:
        """One timed training step for each batch."""
        start = self._clock()
        losses = [self._step(images, labels) for images, labels in batches]
        seconds = self._clock() - start
        self.seconds += seconds
        self.step_seconds.append(seconds / len(batches))
        self.losses += (torch.stack(losses) / self.settings.recipe.loss_divisor).tolist()

    def predict(self, images: Tensor) -> Tensor:
        """The digit that the network reads in each image."""
        with torch.inference_mode():
            return self._logits(images).argmax(dim=1)

    def test(self, data: Dataset) -> float:
        """Record and return the accuracy on the test images."""
        accuracy = (self.predict(data.test_images) == data.test_labels).double().mean().item()
        self.accuracies.append((len(self.losses), accuracy))
        return accuracy

    def _logits(self, images: Tensor) -> Tensor:
        settings = self.settings
        with torch.autocast(settings.device.type, settings.dtype, enabled=settings.autocast):
            logits = self.network(images)
        return logits.to(settings.parameter_dtype)  # the loss is never in half precision

    def _step(self, images: Tensor, labels: Tensor) -> Tensor:
        loss = self.settings.recipe.loss(self._logits(images), labels)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def _clock(self) -> float:
        if self.settings.device.type == "cuda":
            torch.cuda.synchronize(self.settings.device)
        return time.perf_counter()


def build_learners(settings: Settings, data: Dataset) -> tuple[Learner, Learner]:
    """The fused and the plain network, ready to train."""
    fused, plain = build_networks(layer_sizes(settings, data), settings.activation, settings.seed)
    return Learner("fused", fused, settings), Learner("nn.Linear", plain, settings)


def batch_order(settings: Settings, data: Dataset) -> Iterator[list[Tensor]]:
    """For each epoch the indices of every batch; the same for the same seed on every device."""
    count, recipe = len(data.train_labels), settings.recipe
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.epochs):
        order = (
            torch.randperm(count, generator=generator) if recipe.shuffle else torch.arange(count)
        )
        batches = list(order.to(settings.device).split(settings.batch_size))
        if recipe.drop_last and len(batches[-1]) < settings.batch_size:
            batches.pop()
        yield batches


def steps_per_epoch(settings: Settings, data: Dataset) -> int:
    """Training steps in an epoch; DataError if the recipe leaves none."""
    count, size = len(data.train_labels), settings.batch_size
    steps = count // size if settings.recipe.drop_last else math.ceil(count / size)
    if not steps:
        raise DataError(f"a batch of {size} needs more than the {count} training images; "
                        "use a smaller --batch-size")  # fmt: skip
    return steps


def warm_up(settings: Settings, data: Dataset) -> None:
    """Train and test throw-away networks, so that nothing done once is charged to either."""
    batches = next(batch_order(settings, data))
    rehearsal = [(data.train_images[i], data.train_labels[i]) for i in (batches[0], batches[-1])]
    for learner in build_learners(settings, data):
        learner.learn(rehearsal * 3)
        learner.test(data)


def train(
    learners: tuple[Learner, Learner],
    settings: Settings,
    data: Dataset,
    after_epoch: Callable[[int], None],
) -> None:
    """Train both networks in turns on the same batches, under a progress bar."""
    from tqdm import tqdm

    steps = steps_per_epoch(settings, data)
    turns = itertools.cycle((learners, learners[::-1]))  # neither always goes first
    with tqdm(total=settings.epochs * steps, unit="batch", leave=False, disable=None) as bar:
        for epoch, order in enumerate(batch_order(settings, data), start=1):
            bar.set_description(f"epoch {epoch} of {settings.epochs}")
            for begin in range(0, steps, BATCHES_PER_TURN):
                indices = order[begin : begin + BATCHES_PER_TURN]
                batches = [(data.train_images[i], data.train_labels[i]) for i in indices]
                for learner in next(turns):
                    learner.learn(batches)
                bar.update(len(batches))
            for learner in learners:
                learner.test(data)
            bar.clear()
            after_epoch(epoch)
