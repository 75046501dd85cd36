"""The suite `models`: whole models as people have them, untouched, fused and compiled.

Weights are random, from configurations; nothing is downloaded. Dropout is 0 everywhere, so that all
contenders do the same work.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_fused_linear as tfl
from benchmarks import machine
from benchmarks.cases import AUTOCAST, DTYPES, Case
from benchmarks.contenders import conditions_of
from torch_fused_linear.timing import Call, Contender

PASS = "pre_grad_custom_pass"
MODES = {"compile": None, "compile again": None, "compile+pass": None}
MODES |= dict.fromkeys(("reduce-overhead", "reduce-overhead+pass"), "reduce-overhead")
ATTENTION = "without a mask"

# ----------------------------------------------------------------------------------- what is run


class LanguageModel(nn.Module):
    """Logits of token ids, or the loss: it is computed inside of what is compiled."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.model(input_ids=ids).logits
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class MeanOutput(nn.Module):
    """A model's output, or its mean, which stands for a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, as_loss: bool = False) -> Tensor:
        y = self.model(x)
        return y.float().mean() if as_loss else y


# -------------------------------------------------------------------------------------- families


def vit(case: Case, config: dict[str, Any]) -> nn.Module:
    import timm
    from timm.layers import GELUTanh

    act = {"act_layer": GELUTanh} if case.activation == "gelu" else {}  # timm's own: nn.GELU, erf
    return MeanOutput(timm.create_model("vit_base_patch16_224", pretrained=False, **act, **config))


def images(case: Case, module: nn.Module) -> list[Any]:
    shape = (case.sizes[0], 3, *module.model.patch_embed.img_size)
    return [torch.randn(shape), case.with_gradients]


def hugging_face(case: Case, config: dict[str, Any], head: str, settings: str) -> nn.Module:
    """Where torch.compile traces them, transformers' models make masks that nothing needs, and so
    lose the quick attention that eager has: BERT took 1.7 times as long compiled as eager. Without
    padding, attention that is causal or not needs none, compiled or not."""
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    transformers.AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *args, **kwargs: None)
    config = {**config, "attn_implementation": ATTENTION}
    if case.model.startswith("BERT"):
        kind = "gelu_pytorch_tanh" if case.activation == "gelu" else "gelu"
        config = {**config, "hidden_act": kind}
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)  # it minds that BERT is not used as a decoder
    try:
        chosen = getattr(transformers, settings)(use_cache=False, **config)
        return LanguageModel(getattr(transformers, head)(chosen))
    finally:
        log.setLevel(level)


def ids(case: Case, module: nn.Module) -> list[Any]:
    vocabulary = module.model.config.vocab_size
    one, other = (torch.randint(vocabulary, case.sizes) for _ in range(2))
    return [one, other if case.with_gradients else None]


def vgg(case: Case, config: dict[str, Any]) -> nn.Module:
    """Channels-last in memory, as GPUs want it for convolutions in 16 bits."""
    layers, channels = [], 3
    for stage in config["stages"]:
        for out in stage:
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(inplace=True)]
            channels = out
        layers.append(nn.MaxPool2d(2))
    sizes = (channels * config["pixels"], *config["head"])
    head = [m for i, o in itertools.pairwise(sizes) for m in (nn.Linear(i, o), nn.ReLU(True))]
    model = nn.Sequential(*layers, nn.Flatten(), *head[:-1])
    return MeanOutput(model).to(memory_format=torch.channels_last)


def folded_resnet(case: Case, config: dict[str, Any]) -> nn.Module:
    """For inference only: each batch normalisation is folded into the convolution before it."""
    from torchvision.models.resnet import Bottleneck, ResNet

    model = ResNet(Bottleneck, **config).eval()
    for module in model.modules():
        for one, other in itertools.pairwise(list(module._modules)):
            conv, norm = module._modules[one], module._modules[other]
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                module._modules[one] = nn.utils.fuse_conv_bn_eval(conv, norm)
                module._modules[other] = nn.Identity()
    return MeanOutput(model).to(memory_format=torch.channels_last)


def photos(case: Case, module: nn.Module) -> list[Any]:
    x = torch.randn(case.sizes[0], 3, *case.sizes[1:])
    return [x.to(memory_format=torch.channels_last), case.mode == "step"]


def dlrm(case: Case, config: dict[str, Any]) -> nn.Module:
    sizes = config["sizes"]
    layers = [m for i, o in itertools.pairwise(sizes) for m in (nn.Linear(i, o), nn.ReLU())]
    return MeanOutput(nn.Sequential(*layers[:-1]))


class Critic(nn.Module):
    """The value of a state and an action, written as reinforcement learning's examples do."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def critic(case: Case, config: dict[str, Any]) -> nn.Module:
    return MeanOutput(Critic(**config))


def observations(case: Case, module: nn.Module) -> list[Any]:
    return [torch.randn(case.sizes[0], module.model.fc1.in_features), case.with_gradients]


def interactions(case: Case, module: nn.Module) -> list[Any]:
    """Its input has a gradient: it is made of embeddings, which learn as well."""
    x = torch.randn(case.sizes[0], module.model[0].in_features)
    return [x.requires_grad_(case.with_gradients), case.with_gradients]


@dataclass(frozen=True)
class Family:
    """How a model is made, and what it is called with."""

    make: Callable[[Case, dict[str, Any]], nn.Module]
    inputs: Callable[[Case, nn.Module], list[Any]]
    config: dict[str, Any] = field(default_factory=dict)
    conv: bool = False  # whether the pass is asked for convolutions, too


bert = partial(hugging_face, head="BertForMaskedLM", settings="BertConfig")
gpt2 = partial(hugging_face, head="GPT2LMHeadModel", settings="GPT2Config")
llama = partial(hugging_face, head="LlamaForCausalLM", settings="LlamaConfig")
opt = partial(hugging_face, head="OPTForCausalLM", settings="OPTConfig")

BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPT = {"dropout": 0.0, "attention_dropout": 0.0}
# Without sizes of its own a configuration is that of the model's small or base form.
LLAMA = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16}
LLAMA |= {"num_attention_heads": 16, "vocab_size": 8192}
TINY_LLAMA = {"intermediate_size": 24}
WORDS = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY_VIT = {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 10}
TINY_OPT = {"ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 32}
VGG16 = {
    "stages": (2 * [64], 2 * [128], 3 * [256], 3 * [512], 3 * [512]),
    "pixels": 7 * 7,
    "head": (4096, 4096, 1000),
}
TINY_VGG = {"stages": ([8, 8], [16]), "pixels": 2 * 2, "head": (16, 10)}
TINY_RESNET = {"layers": [1, 1, 1, 1], "num_classes": 10, "width_per_group": 4}

FAMILIES = {
    "ViT-B/16": Family(vit, images),
    "BERT-base": Family(bert, ids, BERT),
    "GPT-2 small": Family(gpt2, ids, GPT2),
    "OPT-125M": Family(opt, ids, OPT),
    "LLaMA, 16 layers": Family(llama, ids, LLAMA),
    # The top of MLPerf's DLRM, deeper; 480 as NVIDIA pads its 479, so that rows are aligned.
    "DLRM top MLP": Family(
        dlrm, interactions, {"sizes": (480, 1024, 1024, 1024, 512, 512, 256, 128, 1)}
    ),
    # 17 observations and 6 actions of HalfCheetah.
    "TD3 critic": Family(critic, observations, {"inputs": 23, "hidden": 256}),
    "VGG-16": Family(vgg, photos, VGG16, conv=True),
    "ResNet-50, folded": Family(folded_resnet, photos, {"layers": [3, 4, 6, 3]}, conv=True),
    "ViT-tiny": Family(vit, images, TINY_VIT),
    "BERT-tiny": Family(bert, ids, {**BERT, **WORDS, **TINY, "intermediate_size": 32}),
    "GPT-2 tiny": Family(gpt2, ids, {**GPT2, **WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "OPT-tiny": Family(opt, ids, {**OPT, **WORDS, **TINY, **TINY_OPT}),
    "LLaMA-tiny": Family(llama, ids, {**WORDS, **TINY, **TINY_LLAMA}),
    "DLRM tiny": Family(dlrm, interactions, {"sizes": (16, 24, 24, 24, 16, 16, 8, 8, 1)}),
    "TD3 tiny": Family(critic, observations, {"inputs": 5, "hidden": 16}),
    "VGG-tiny": Family(vgg, photos, TINY_VGG, conv=True),
    "ResNet-tiny, folded": Family(folded_resnet, photos, TINY_RESNET, conv=True),
}


# ------------------------------------------------------------------------------------ contenders


class Models:
    """The contenders of one case: each has a copy of one model, and all have the same inputs."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.copies: dict[str, nn.Module] = {}
        self.counts: dict[str, Callable[[], int]] = {}
        self.samples: dict[str, list[tuple[float, float]]] = {}  # of clock and power, of each turn

    @cached_property
    def original(self) -> tuple[nn.Module, list[Any]]:
        """Made at first use: what is missing for it is every contender's failure, not the run's."""
        case, dtype = self.case, DTYPES.get(self.case.dtype, torch.float32)
        family = FAMILIES[case.model]
        module = family.make(case, family.config).to(self.device, dtype)

        def placed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            there = value.detach().to(self.device, dtype if value.is_floating_point() else None)
            return there.requires_grad_(value.requires_grad)

        inputs = [placed(value) for value in family.inputs(case, module)]
        return module.train(case.with_gradients), inputs

    def call(self, name: str) -> tuple[Call, list[Tensor]]:
        """A call of the contender's own copy, and what has a gradient by it."""
        module, inputs = self.original
        own = self.copies[name] = copy.deepcopy(module)
        network: Callable[..., Tensor] = own
        if name in ("fused", "fused-low"):
            memory = "low" if name == "fused-low" else "default"
            blocks = len(tfl.fuse_(own, memory=memory).fused)
            self.counts[name] = lambda: blocks
        elif name.endswith("+pass"):
            options = tfl.compile_options(MODES[name], conv=FAMILIES[self.case.model].conv)
            network = torch.compile(own, dynamic=False, options=options)
            # Known when it has been compiled, at the first call.
            self.counts[name] = lambda: options[PASS].replaced.total()
        elif name in MODES:
            network = torch.compile(own, dynamic=False, mode=MODES[name])
        leaves = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
        return partial(network, *inputs), [*leaves, *own.parameters()]

    def contender(self, name: str) -> Contender:
        call, leaves = self.call(name)
        if self.case.mode != "forward":
            of_weights = list(self.copies[name].parameters())
            trains = self.case.mode == "train"
            optimizer = torch.optim.AdamW(of_weights, fused=True) if trains else None
            call = step_of(call, leaves, optimizer)
        return Contender(name, call, partial(self.conditions, name))

    @contextlib.contextmanager
    def conditions(self, name: str) -> Iterator[None]:
        is_autocast = self.case.dtype == AUTOCAST
        samples = self.samples.setdefault(name, [])
        with (
            conditions_of(name, self.case),
            torch.autocast(self.device.type, torch.bfloat16, is_autocast),
            machine.observed(self.device, samples),
        ):
            yield

    def observed(self, contenders: Sequence[Contender]) -> dict[str, dict[str, float]]:
        """Of each contender what Record.observed has; nothing without a GPU."""
        found: dict[str, dict[str, float]] = {}
        for contender in contenders if self.device.type == "cuda" else ():
            samples = list(zip(*self.samples[contender.name]))
            means = dict(zip(("MHz", "W"), map(statistics.median, samples)))
            with contender.conditions():
                torch.cuda.reset_peak_memory_stats()
                contender.call()
                peak = torch.cuda.max_memory_allocated() / 2**20
                means = {"kernels": kernel_microseconds(contender), "peak": peak, **means}
            found[contender.name] = means
        return found

    def replaced(self) -> dict[str, int]:
        """Blocks that fuse_ found, and operators that the pass put in."""
        return {name: count() for name, count in self.counts.items()}


def step_of(
    loss: Callable[[], Tensor],
    leaves: list[Tensor],
    optimizer: torch.optim.Optimizer | None = None,
) -> Call:
    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        for leaf in leaves:
            leaf.grad = None
        loss().backward()
        if optimizer is not None:
            optimizer.step()

    return step


def kernel_microseconds(contender: Contender) -> float:
    """Of one call, without what is idle between its kernels."""
    on_gpu = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[on_gpu], acc_events=True) as profile:
        contender.call()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.events())
