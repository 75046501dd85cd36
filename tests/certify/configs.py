"""Random configurations of Inductor, for a model of our layers under our pass of torch.compile.

A unit is one configuration, drawn and run by torch's ConfigFuzzer: a few layers are compiled under
it, forward and backward, and compared with eager. A configuration that fails is tried with plain
layers and without our pass. Only where those are right the failure is ours.
"""

from __future__ import annotations

import io
import logging
import random
import signal
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial

import torch
from layers import LAYERS
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch._inductor.fuzzer import DEFAULT, MODULE_DEFAULTS, ConfigFuzzer, Status

from certify import parts
from certify.parts import Found
from torch_fused_linear.graph.fusion_pass import FusionPass

Config = dict[str, object]

PART = 0.05  # of the options are changed
SECONDS = 300  # after so many a configuration has failed
ALLOWED = 1e-4  # of an error, of the size of the result

# --- the model -----------------------------------------------------------------------------------

ROWS = [row for row in LAYERS if row.width]  # which all read the same input


class Sine(nn.Module):
    """Has a kernel by the compiler itself, beside what is ours."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Model(nn.Module):
    """Blocks side by side."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [block(x) for block in self.blocks]


class Problem:
    """Some blocks, plain and ours, what they are called with, and what eager gives."""

    def __init__(self, choice: random.Random, device: str) -> None:
        torch.manual_seed(choice.getrandbits(32))
        rows = [choice.choice(ROWS) for _ in range(2)]
        layers = [row.make() for row in rows]
        plain = [row.twin(layer) for row, layer in zip(rows, layers)]
        # Where there are none of ours, our pass is to find them.
        ours = [choice.choice(pair) for pair in zip(layers, plain)]
        more = [Sine()] if choice.random() < 0.5 else []
        self.plain, self.ours = (Model(blocks + more).to(device) for blocks in (plain, ours))
        self.trains = choice.random() < 0.8
        # On the CPU: a capture that failed leaves a GPU's generator unusable.
        self.x = torch.randn(choice.choice((1, 5, 33)), rows[0].width).to(device)
        x = self.leaf()
        with torch.set_grad_enabled(self.trains):
            self.want = self.results(self.plain, x, self.plain(x))

    def __str__(self) -> str:
        names = ", ".join(type(block).__name__ for block in self.ours.blocks)
        return f"{names}, {len(self.x)} rows, {'training' if self.trains else 'inference'}"

    def leaf(self) -> Tensor:
        return self.x.clone().requires_grad_(self.trains)

    def results(self, model: nn.Module, x: Tensor, y: list[Tensor]) -> list[Tensor]:
        if not self.trains:
            return y
        total = sum(t.square().sum() for t in y)
        return [*(t.detach() for t in y), *torch.autograd.grad(total, [x, *model.parameters()])]

    @torch.compiler.disable
    def is_right(self, model: nn.Module, x: Tensor, y: list[Tensor]) -> bool:
        return all(
            a.dtype == b.dtype
            and a.shape == b.shape
            and bool((a - b).abs().max() <= ALLOWED * (1 + b.abs().max()))
            for a, b in zip(self.results(model, x, y), self.want, strict=True)
        )

    def test(self, model: nn.Module) -> Callable[[], bool]:
        """The function that ConfigFuzzer compiles and runs."""
        x = self.leaf()
        return lambda: self.is_right(model, x, model(x))


# --- configurations ------------------------------------------------------------------------------

# Options that keep their values: of other backends, of AOTInductor, of distributed training, of
# remote caches and of the compiler's own tests; names of files, folders and programs, none of which
# a random word is; threads and processes; what takes no operators of others, or no plain layer.
LEFT_ALONE = (
    *("aot_inductor", "aten_distributed_optimizations.", "_collective.", "distributed_", "bucket_"),
    *("cutlass.", "cuda.", "xpu", "rocm.", "halide.", "tpu_backend", "cuda_backend", "cpu_backend"),
    *("test_configs.", "trace.", "lookup_table.", "autoheuristic_", "profile_bandwidth"),
    *("fx_graph_remote_cache", "remote_gemm_autotune_cache", "autotune_remote_cache"),
    *("bundled_autotune_remote_cache", "global_cache_dir", "torchinductor_worker_logpath"),
    *("worker_", "compile_threads", "cpp.threads", "pipeline_max_autotune_gemm", "autotune_in_sub"),
    *("implicit_fallbacks", "fallback_by_default", "fx_wrapper"),
    # Their effect outlasts the configuration: no Triton any more, hooks that divide by 0.
    *("triton_disable_device_detection", "triton.proton"),
)
OF_GPUS = ("triton.", "annotate_training")


def fuzzer_of(problem: Problem, device: str, is_ours: bool) -> ConfigFuzzer:
    fixed = dict(MODULE_DEFAULTS[inductor.__name__])
    prefixes = LEFT_ALONE if device == "cuda" else LEFT_ALONE + OF_GPUS
    for name, entry in inductor._config.items():
        if name.startswith(prefixes):
            fixed[name] = DEFAULT
        elif entry.alias and name not in fixed:  # whose default is a placeholder
            fixed[name] = getattr(inductor, name)
    if is_ours:
        fixed["pre_grad_custom_pass"] = FusionPass()
    factory = partial(problem.test, problem.ours if is_ours else problem.plain)
    return ConfigFuzzer(inductor, factory, seed=0, default=fixed, test_timeout=SECONDS)


def drawn(seed: int, unit: int, device: str) -> tuple[Problem, Config]:
    choice = random.Random(f"{seed} {unit}")
    problem = Problem(choice, device)
    fuzzer = fuzzer_of(problem, device, is_ours=True)
    random.seed(choice.getrandbits(32))  # from which the fuzzer takes its values
    config = {}
    for name, entry in fuzzer.fields.items():
        is_free = name not in fuzzer.default and not name.startswith("_")
        if is_free and "TESTING_ONLY" not in name and choice.random() < PART:
            config[name] = fuzzer.sample(name, entry.value_type, entry.default)
    return problem, config


# --- the whole -----------------------------------------------------------------------------------


class Trial(parts.Trial):
    def __init__(self, device: str, measured: bool) -> None:
        super().__init__(device, measured)
        warnings.simplefilter("ignore")
        logging.disable()

    def one(self, seed: int, unit: int) -> Found:
        problem, config = drawn(seed, unit, self.device)
        found = {"options": len(config), "replaced": {}}
        wrong = self.wrong(problem, config, True, found["replaced"])
        if not wrong:
            return {**found, "right": 1}
        if of_torch := self.wrong(problem, config, False):
            return {**found, "plain torch fails, too": {of_torch: 1}}
        if not self.wrong(problem, config, True):
            return {**found, "right the second time": {wrong: 1}}
        least = self.least(problem, config)
        return {**found, "failures": [f"{wrong} in {problem}, under {least}"]}

    def plain(self, seed: int, unit: int) -> None:
        """Plain torch alone, which may end the process."""
        self.wrong(*drawn(seed, unit, self.device), is_ours=False)

    def wrong(
        self, problem: Problem, config: Config, is_ours: bool, replaced: Found | None = None
    ) -> str:
        """The fault under a configuration in words, or nothing."""
        fuzzer = fuzzer_of(problem, self.device, is_ours)
        out, err = (redirect(io.StringIO()) for redirect in (redirect_stdout, redirect_stderr))
        with out, err, torch.set_grad_enabled(problem.trains):
            results = fuzzer.reproduce_single(config)
        signal.alarm(0)  # the fuzzer leaves its alarm set
        if replaced is not None:
            replaced |= fuzzer.default["pre_grad_custom_pass"].replaced
        status = results.lookup({**fuzzer.new_config(), **config})
        if status == Status.PASSED:
            return ""
        errors = [details["exception"] for details in fuzzer.detailed_results.values()]
        return " ".join(f"{status.value}: {' '.join(errors)}".split())[:200]

    def least(self, problem: Problem, config: Config) -> Config:
        """Without the options that do not matter. (The fuzzer's own bisect drops its defaults as
        well, and does not end where two options have to come together.)"""
        for names in (list(config), *([name] for name in config)):
            less = {name: value for name, value in config.items() if name not in names}
            is_less = len(less) < len(config)
            if is_less and self.wrong(problem, less, True) and not self.wrong(problem, less, False):
                config = less
        return config
