"""The suite `models`: whole models as people have them, untouched, fused and compiled.

Weights are random, from configurations; nothing is downloaded. Dropout is 0 everywhere, so that all
contenders do the same work.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
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
from benchmarks.contenders import COMPILED, compiled, conditions_of, events_of, marked, step_of
from torch_fused_linear.timing import Call, Contender

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
    transformers.logging.set_verbosity_error()  # it minds that BERT is not used as a decoder
    chosen = getattr(transformers, settings)(use_cache=False, **config)
    return LanguageModel(getattr(transformers, head)(chosen))


def perceptron(sizes: Sequence[int], inplace: bool) -> list[nn.Module]:
    """Layers with ReLU between them."""
    pairs = itertools.pairwise(sizes)
    return [m for i, o in pairs for m in (nn.Linear(i, o), nn.ReLU(inplace))][:-1]


def vgg(case: Case, config: dict[str, Any]) -> nn.Module:
    """Channels-last in memory, as GPUs want it for convolutions in 16 bits."""
    layers, channels = [], 3
    for stage in config["stages"]:
        for out in stage:
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(inplace=True)]
            channels = out
        layers.append(nn.MaxPool2d(2))
    head = perceptron((channels * config["pixels"], *config["head"]), inplace=True)
    model = nn.Sequential(*layers, nn.Flatten(), *head)
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


def dlrm(case: Case, config: dict[str, Any]) -> nn.Module:
    return MeanOutput(nn.Sequential(*perceptron(config["sizes"], inplace=False)))


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


@dataclass(frozen=True)
class Family:
    """How a model is made, and what it is called with."""

    make: Callable[[Case, dict[str, Any]], nn.Module]
    config: dict[str, Any] = field(default_factory=dict)
    sample: tuple[int, ...] = ()  # the shape of one of a batch; without, it reads token ids
    conv: bool = False  # whether the pass is asked for convolutions, too

    def inputs(self, case: Case, module: nn.Module) -> list[Any]:
        """Makes a batch and its target: the labels, or whether the output is the loss."""
        if not self.sample:
            vocabulary = module.model.config.vocab_size
            ids, labels = (torch.randint(vocabulary, case.sizes) for _ in range(2))
            return [ids, labels if case.with_gradients else None]
        x = torch.randn(case.sizes[0], *self.sample)
        if self.conv:
            x = x.to(memory_format=torch.channels_last)
        of_embeddings = self.make is dlrm  # which learn as well
        return [x.requires_grad_(of_embeddings and case.with_gradients), case.with_gradients]


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
# The top of MLPerf's DLRM, deeper; 480 as NVIDIA pads its 479, so that rows are aligned.
DLRM = (480, 1024, 1024, 1024, 512, 512, 256, 128, 1)
TINY_DLRM = (16, 24, 24, 24, 16, 16, 8, 8, 1)
SQUARE, TINY_SQUARE = (3, 224, 224), (3, 32, 32)

FAMILIES = {
    "ViT-B/16": Family(vit, {}, SQUARE),
    "BERT-base": Family(bert, BERT),
    "GPT-2 small": Family(gpt2, GPT2),
    "OPT-125M": Family(opt, OPT),
    "LLaMA, 16 layers": Family(llama, LLAMA),
    "DLRM top MLP": Family(dlrm, {"sizes": DLRM}, DLRM[:1]),
    # 17 observations and 6 actions of HalfCheetah.
    "TD3 critic": Family(critic, {"inputs": 23, "hidden": 256}, (23,)),
    "VGG-16": Family(vgg, VGG16, SQUARE, conv=True),
    "ResNet-50, folded": Family(folded_resnet, {"layers": [3, 4, 6, 3]}, SQUARE, conv=True),
    "ViT-tiny": Family(vit, TINY_VIT, TINY_SQUARE),
    "BERT-tiny": Family(bert, {**BERT, **WORDS, **TINY, "intermediate_size": 32}),
    "GPT-2 tiny": Family(gpt2, {**GPT2, **WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "OPT-tiny": Family(opt, {**OPT, **WORDS, **TINY, **TINY_OPT}),
    "LLaMA-tiny": Family(llama, {**WORDS, **TINY, **TINY_LLAMA}),
    "DLRM tiny": Family(dlrm, {"sizes": TINY_DLRM}, TINY_DLRM[:1]),
    "TD3 tiny": Family(critic, {"inputs": 5, "hidden": 16}, (5,)),
    "VGG-tiny": Family(vgg, TINY_VGG, (3, 8, 8), conv=True),
    "ResNet-tiny, folded": Family(folded_resnet, TINY_RESNET, TINY_SQUARE, conv=True),
}


# ------------------------------------------------------------------------------------ contenders


class Models:
    """The contenders of one case: each has a copy of one model, and all have the same inputs."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.copies: dict[str, nn.Module] = {}
        self.counts: dict[str, Callable[[], int]] = {}
        self.clocks: dict[str, list[int]] = {}  # at the end of each turn

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

        inputs = list(map(placed, family.inputs(case, module)))
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
        elif name in COMPILED:
            network, replaced = compiled(own, name, FAMILIES[self.case.model].conv)
            if replaced is not None:
                self.counts[name] = replaced.total
        leaves = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
        return partial(network, *inputs), [*leaves, *own.parameters()]

    def contender(self, name: str) -> Contender:
        call, leaves = self.call(name)
        if self.case.mode != "forward":
            of_weights = list(self.copies[name].parameters())
            trains = self.case.mode == "train"
            optimizer = torch.optim.AdamW(of_weights, fused=True) if trains else None
            call = step_of(marked(call), leaves, optimizer=optimizer)
        return Contender(name, call, partial(self.conditions, name))

    @contextlib.contextmanager
    def conditions(self, name: str) -> Iterator[None]:
        is_autocast = self.case.dtype == AUTOCAST
        with (
            conditions_of(name, self.case),
            torch.autocast(self.device.type, torch.bfloat16, is_autocast),
            machine.observed(self.device, self.clocks.setdefault(name, [])),
        ):
            yield

    def observed(
        self, contenders: Sequence[Contender], seconds: float
    ) -> dict[str, dict[str, float]]:
        """Record.observed of each contender; nothing without a GPU."""
        found: dict[str, dict[str, float]] = {}
        for contender in contenders if self.device.type == "cuda" else ():
            seen = {}
            if clocks := self.clocks[contender.name]:
                seen["MHz"] = statistics.median(clocks)
            with contender.conditions():
                torch.cuda.reset_peak_memory_stats()
                contender.call()
                seen["peak"] = torch.cuda.max_memory_allocated() / 2**20
                if watts := machine.power(self.device, contender.call, seconds):
                    seen["mean W"] = watts
            # Without what is idle between them.
            kernels = sum(e.self_device_time_total for e in events_of(contender, self.device))
            found[contender.name] = {"kernels": kernels, **seen}
        return found

    def replaced(self) -> dict[str, int]:
        """Blocks that fuse_ found, and operators that the pass put in."""
        return {name: count() for name, count in self.counts.items()}
