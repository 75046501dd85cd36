"""The suites: each is a list of cases to measure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from benchmarks import gated, rivals
from benchmarks.convolutions import CONVOLUTIONS, TINY_CONVOLUTIONS, Convolution

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COMPILED = [CONVOLUTIONS[i] for i in (1, 3, 6, -1)]  # beside which torch.compile runs
AUTOCAST = "amp"  # fp32 weights under bf16 autocast; of whole models only
# The operators' names of the activations as cases name them.
KINDS = {"relu": "relu", "gelu": "gelu_tanh", "gelu-erf": "gelu_erf", "silu": "silu"}
ACTIVATIONS = ("relu", "gelu")  # GELU is the tanh form, which cuBLASLt computes
ALL_ACTIVATIONS = (*ACTIVATIONS, "gelu-erf")

LAYERS = ((64, 64), (784, 30), (768, 3072), (1024, 4096), (4096, 16384))
WIDTHS = (768, 1024, 4096)
MEMORY_MODES = ("saved", "peak")

# Name, its activation, and how much of it at once: the batch, and of each the tokens or the height
# and width (models.py has the rest).
# GELU by erf is what ViT and BERT are trained with; the tanh form is the one that epilogues have.
MODELS = (
    ("ViT-B/16", "gelu-erf", (128, 197)),
    ("ViT-B/16", "gelu", (128, 197)),
    ("BERT-base", "gelu-erf", (32, 512)),
    ("BERT-base", "gelu", (32, 512)),
    ("GPT-2 small", "gelu", (8, 1024)),
    ("OPT-125M", "relu", (8, 1024)),
    ("LLaMA, 16 layers", "silu", (4, 2048)),
    ("DLRM top MLP", "relu", (8192, 1)),
    ("TD3 critic", "relu", (256, 1)),
    ("VGG-16", "relu", (32, 224, 224)),
    ("ResNet-50, folded", "relu", (32, 224, 224)),
)
MEMORY_MODELS = (
    ("ViT-B/16", "gelu-erf", (32, 197)),
    ("ViT-B/16", "gelu", (32, 197)),
    ("LLaMA, 16 layers", "silu", (4, 2048)),
)
TINY_MODELS = (
    ("ViT-tiny", "gelu-erf", (2, 5)),
    ("BERT-tiny", "gelu", (2, 4)),
    ("GPT-2 tiny", "gelu", (2, 4)),
    ("OPT-tiny", "relu", (2, 4)),
    ("LLaMA-tiny", "silu", (2, 4)),
    ("DLRM tiny", "relu", (4, 1)),
    ("TD3 tiny", "relu", (4, 1)),
    ("VGG-tiny", "relu", (2, 8, 8)),
    ("ResNet-tiny, folded", "relu", (2, 32, 32)),
)


@dataclass(frozen=True)
class Case:
    """One row of a table: layers between `sizes`, each but the last of several with activation.

    A single layer has its activation too. Of a whole model, which `model` names, the sizes are the
    batch and the tokens, or height and width, of each of its members; of a convolution, `conv`, the
    channels, and the tokens are the images of a batch. `mode` says what of it is run:

    - forward: inference, no gradient wanted
    - step: forward and backward with the gradients of input, weights and biases
    - train: a step and that of the optimizer, AdamW
    - backward: only the latter half of a step
    - edge: the gradient of the layer before through this one, its ReLU's derivative and bias sum
      included; sizes are those of the later layer, from its output to its input
    - graph: a step captured into a CUDA graph and replayed
    - saved, peak: the memory that a step keeps for its backward, and takes at most
    - from output, from mask, from input: the gradient of the activation alone, by what it reads
    - grad, fp32 grad: the weight's gradient alone, of four micro-batches of so many tokens
    """

    suite: str
    sizes: tuple[int, ...]
    tokens: int
    dtype: str
    activation: str
    mode: str
    model: str = ""
    conv: Convolution | None = None

    @property
    def shape(self) -> str:
        if self.conv:
            return str(self.conv)
        if self.model:
            return f"{self.model} {'×'.join(map(str, self.sizes))}"
        return "→".join(map(str, self.sizes))

    @property
    def amount(self) -> str:
        return f"{'N' if self.conv else 'T'}={self.tokens}"

    @property
    def is_gated(self) -> bool:
        """Returns whether it is a block with two layers from the first size to the second."""
        return self.suite.startswith("gated")

    @property
    def kind(self) -> str:
        """By which contenders and data differ."""
        named = {"model": self.model, "conv": self.conv, "gated": self.is_gated}
        named |= {"edge": self.mode == "edge", "one pass": self.suite == "activation"}
        named |= {"accumulation": self.suite == "accumulation"}
        return next((kind for kind, is_it in named.items() if is_it), "layers")

    @property
    def with_gradients(self) -> bool:
        return self.mode not in ("forward", "edge")

    def __str__(self) -> str:
        words = (self.suite, self.shape, self.amount, self.dtype, self.activation, self.mode)
        return " ".join(words)


@dataclass(frozen=True)
class Suite:
    """Which cases, beside whom, and for how long each."""

    about: str
    baselines: tuple[str, ...]
    seconds: float = 1.0
    sizes: tuple[tuple[int, ...], ...] = ()
    tokens: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ("bf16",)
    activations: tuple[str, ...] = ALL_ACTIVATIONS
    modes: tuple[str, ...] = ("forward", "step")
    # The sizes for --quick, which shows in seconds that everything runs.
    quick_sizes: tuple[tuple[int, ...], ...] = ((16, 24),)
    # Which contenders are of this package; what each is compared with is in results.REFERENCES.
    ours: tuple[str, ...] = ("ours", "mlp")
    kernels: bool = False  # whether those of one call are named unasked
    # Instead of sizes, tokens and activations.
    models: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    quick_models: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    # Beside the sizes; each with ReLU, and once in each memory format.
    convolutions: tuple[Convolution, ...] = ()
    quick_convolutions: tuple[Convolution, ...] = ()
    # Returns whether a point of the grid belongs to the full suite, where GPU time counts.
    worth: Callable[[Case], bool] = lambda case: True
    # Returns whether torch.compile, which takes from seconds to a minute, runs beside a case.
    compiles: Callable[[Case], bool] = lambda case: False


def block(width: int) -> tuple[int, int, int]:
    """The feed-forward block of a transformer."""
    return (width, 4 * width, width)


GATED = Suite(
    about="gated block of a language model with SiLU, inference and training step",
    sizes=gated.SIZES,
    tokens=(1, 8, 64, 8192),
    baselines=("low", "eager", "mm", "compile", "liger", "quack", "quack-tuned"),
    activations=("silu",),
    quick_sizes=((16, 24, 16),),
    ours=("ours", "fused"),
    worth=lambda case: case.tokens == 8192 or case.mode == "forward",
    compiles=lambda case: case.dtype == "bf16" and case.tokens in (1, 8192),
)
SUITES = {
    "layer": Suite(
        about="one layer, forward and training step",
        sizes=LAYERS,
        tokens=(64, 512, 8192),
        baselines=("eager", "addmm", "mm", "linear"),
        seconds=0.6,
        dtypes=("bf16", "fp16", "fp32"),
        quick_sizes=((16, 24), (24, 16)),
        worth=lambda case: case.dtype != "fp32" or case.sizes in LAYERS[:2],
        compiles=lambda case: (
            case.dtype == "bf16" and (case.sizes, case.tokens) == ((1024, 4096), 8192)
        ),
    ),
    "ffn": Suite(
        about="feed-forward block d→4d→d, training step",
        sizes=tuple(map(block, WIDTHS)),
        tokens=(512, 8192, 65536),
        modes=("step",),
        baselines=("cublaslt", "mlp-cublaslt", "eager", "mm"),
        dtypes=("bf16", "fp16"),
        quick_sizes=(block(8),),
        compiles=lambda case: case.dtype == "bf16" and case.tokens == 8192,
    ),
    "rivals": Suite(
        about="feed-forward block d→4d→d beside other libraries, training step",
        sizes=tuple(map(block, (768, 1024, 2048, 4096))),
        tokens=(8192, 65536),
        modes=("step", "graph"),
        baselines=("eager", "mm", "compile", *rivals.BLOCKS),
        activations=ACTIVATIONS,
        quick_sizes=(block(8),),
        worth=lambda case: case.tokens == 8192 or case.sizes[0] == 1024,
        compiles=lambda case: case.dtype == "bf16",
    ),
    "mlp-small": Suite(
        about="small networks, training step with and without a CUDA graph",
        sizes=((64, 64, 64, 64), (784, 256, 10), (17, 256, 256, 6)),
        tokens=(64, 256),
        modes=("step", "graph"),
        baselines=("eager", "mm"),
        seconds=0.6,
        dtypes=("bf16", "fp16", "fp32"),
        activations=ACTIVATIONS,
        quick_sizes=((16, 16, 8),),
        worth=lambda case: (case.tokens == 64) == (case.sizes[0] == 17),
        compiles=lambda case: case.dtype == "bf16",
    ),
    "headline": Suite(
        about="65536x16384 times 16384x8192, the shape of NVIDIA's nvmath-python example",
        sizes=((16384, 8192),),
        tokens=(65536,),
        modes=("forward", "backward", "edge"),
        baselines=("cublaslt", "eager", "addmm", "mm", "linear", "nvmath"),
        seconds=4.0,
        dtypes=("fp16",),
        activations=("relu",),
    ),
    "host": Suite(
        about="CPU time per call of one layer, the GPU not waited for",
        sizes=((64, 64),),
        tokens=(64,),
        baselines=("eager", "addmm"),
        seconds=0.4,
        dtypes=("bf16", "fp16"),
        activations=ACTIVATIONS,
    ),
    "gated": GATED,
    "gated-cpu": replace(
        GATED,
        about="gated block on a CPU, inference and training step",
        sizes=gated.SIZES[:1],
        tokens=(1, 32, 256),
        baselines=("eager",),
        dtypes=("fp32", "bf16"),
        worth=lambda case: True,
    ),
    "gated-host": replace(
        GATED,
        about="CPU time per call of a gated block, the GPU not waited for",
        sizes=gated.SIZES[:1],
        tokens=(1, 64),
        baselines=("eager", "liger"),
        seconds=0.4,
        worth=lambda case: True,
    ),
    "gated-memory": replace(
        GATED,
        about="memory that a gated block keeps for its backward, and takes at most",
        tokens=(8192,),
        modes=MEMORY_MODES,
        baselines=("low", "eager", "liger", "quack"),
        seconds=0.0,
    ),
    "conv": Suite(
        about="convolution, bias and ReLU: layers of a ResNet, forward and training step",
        modes=("forward", "step", "graph"),
        ours=("ours", "compile+pass"),
        baselines=("eager", "conv", "compile"),
        seconds=0.4,
        dtypes=("bf16", "fp16", "fp32"),
        convolutions=CONVOLUTIONS,
        quick_convolutions=TINY_CONVOLUTIONS,
        worth=lambda case: case.mode != "graph" or (case.dtype == "bf16" and case.conv.last),
        compiles=lambda case: case.dtype == "bf16" and case.conv in COMPILED,
    ),
    "cpu": Suite(
        about="one layer on a CPU, inference and training step",
        sizes=LAYERS[:3],
        tokens=(1, 32, 256, 2048),
        baselines=("packed", "eager", "compile"),
        seconds=0.5,
        dtypes=("fp32", "bf16"),
        compiles=lambda case: case.sizes == (768, 3072) and case.tokens >= 256,
    ),
    "memory": Suite(
        about="memory that a step keeps for its backward, and takes at most",
        sizes=((768, 3072), (1024, 4096), (784, 30), block(768), block(1024)),
        tokens=(8192,),
        modes=MEMORY_MODES,
        baselines=("low", "mlp-low", "cublaslt", "mlp-cublaslt", "eager"),
        seconds=0.0,
        quick_sizes=((16, 24), block(8)),
        convolutions=(Convolution(64, 64, 3, 56), Convolution(64, 256, 1, 56)),
        quick_convolutions=TINY_CONVOLUTIONS[1:2],
    ),
    "memory-models": Suite(
        about="memory that a step of a whole model keeps for its backward, and takes at most",
        modes=MEMORY_MODES,
        ours=("fused", "fused-low"),
        baselines=("eager",),
        seconds=0.0,
        models=MEMORY_MODELS,
        quick_models=tuple(m for m in TINY_MODELS if m[0] in ("ViT-tiny", "DLRM tiny")),
    ),
    "activation": Suite(
        about="gradient of activation and bias in one pass, beside a copy of the same tensor",
        sizes=((3072,), (4096,), (16384,)),
        tokens=(8192, 65536),
        modes=("from output", "from mask", "from input"),
        baselines=("eager", "copy"),
        seconds=0.3,
        quick_sizes=((128,),),
        worth=lambda case: case.tokens == 8192 or case.sizes == (4096,),
    ),
    "accumulation": Suite(
        about="feed-forward block d→4d→d, training step of four micro-batches",
        sizes=tuple(map(block, (768, 1024, 4096))),
        tokens=(2048, 8192),
        modes=("grad", "fp32 grad"),
        ours=("ours", "compile+pass"),
        baselines=("apart", "eager", "compile"),
        activations=("gelu",),
        quick_sizes=(block(8),),
        kernels=True,
        compiles=lambda case: True,
    ),
    "models": Suite(
        about="whole models, inference and training step",
        modes=("forward", "step", "train"),
        ours=("fused", "compile+pass", "reduce-overhead+pass", "compile again"),
        baselines=("eager", "compile", "reduce-overhead"),
        dtypes=("bf16", AUTOCAST),
        models=MODELS,
        quick_models=TINY_MODELS,
        compiles=lambda case: "tiny" not in case.model,
    ),
}

QUICK_TOKENS = (8,)
IMAGES = {"cuda": 32, "cpu": 4}  # of a batch
QUICK_IMAGES = 2


def makes_sense(case: Case, device: torch.device) -> bool:
    """Returns whether to measure this point of the grid."""
    if "folded" in case.model:  # there is nothing left to train
        return case.mode == "forward" and case.dtype != AUTOCAST
    # For how people train, beside a step of bf16 weights, one model stands for all.
    if case.mode == "train" or case.dtype == AUTOCAST:
        is_step = case.mode == ("train" if case.dtype != AUTOCAST else "step")
        return is_step and case.model.startswith("GPT-2")
    if case.mode in ("graph", "peak"):
        return device.type == "cuda"
    if case.suite == "cpu":
        return device.type == "cpu"
    if case.suite == "activation":
        return (case.mode == "from input") == (case.activation != "relu")
    return True


def cases_of(
    name: str, device: torch.device, quick: bool = False, dtypes: Iterable[str] | None = None
) -> list[Case]:
    """The cases of suite `name` in the order in which they run; `dtypes` instead of its own."""
    suite, names = SUITES[name], dtypes or SUITES[name].dtypes
    models = suite.quick_models if quick else suite.models
    cases = [
        Case(name, sizes, math.prod(sizes), dtype, activation, mode, model)
        for (model, activation, sizes), dtype, mode in itertools.product(models, names, suite.modes)
    ]
    sizes = suite.quick_sizes if quick and suite.sizes else suite.sizes
    tokens = QUICK_TOKENS if quick else suite.tokens
    grid = itertools.product(sizes, tokens, names, suite.activations, suite.modes)
    cases += [Case(name, *point) for point in grid]
    layers = suite.quick_convolutions if quick else suite.convolutions
    images = QUICK_IMAGES if quick else IMAGES[device.type]
    for conv, last, dtype, mode in itertools.product(layers, (True, False), names, suite.modes):
        point = (conv.channels, conv.out), images, dtype, "relu", mode
        cases.append(Case(name, *point, conv=replace(conv, last=last)))
    return [c for c in cases if makes_sense(c, device) and (quick or suite.worth(c))]
