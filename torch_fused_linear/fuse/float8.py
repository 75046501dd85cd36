"""Decides which of torchao's Float8Linear layers our FP8 operators compute, with the same casts to
the bit: those of the recipe ``tensorwise``. torchao need not be installed, and is not imported.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .families import full_name

FLOAT8_LINEAR = "torchao.float8.float8_linear.Float8Linear"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CASTS = ("input", "input_for_grad_weight", "weight", "weight_for_grad_input")
CASTS += ("grad_output", "grad_output_for_grad_weight")
PRODUCTS = ("output", "grad_input", "grad_weight")
# Every option of a layer. A release with others may compute something else.
OPTIONS = {f"cast_config_{name}" for name in CASTS} | {f"gemm_config_{name}" for name in PRODUCTS}
OPTIONS |= {"enable_fsdp_float8_all_gather", "pad_inner_dim", "emulate"}
OPTIONS |= {"round_scales_to_power_of_2", "force_recompute_fp8_weight_in_bwd"}  # it does nothing


def is_float8(layer: object) -> bool:
    return full_name(type(layer)) == FLOAT8_LINEAR


def is_known(layer: nn.Module) -> bool:
    """Returns whether it is of a release of torchao's whose options are these."""
    options = getattr(getattr(layer, "config", None), "__dict__", {})
    return options.keys() == OPTIONS and hasattr(layer, "linear_mm_config")


class Tensorwise:
    """The questions about the recipe, as methods and with constants in their code: Dynamo tests
    neither before a call, but whether a layer still has the options that were read."""

    def objection(self, layer: nn.Module, weight: Tensor) -> str | None:
        """Why torchao must compute this layer, or None."""
        config, products = layer.config, layer.linear_mm_config
        for name in (
            "cast_config_input",
            "cast_config_input_for_grad_weight",
            "cast_config_weight",
            "cast_config_weight_for_grad_input",
        ):
            if self._is_other_cast(getattr(config, name), torch.float8_e4m3fn):
                return f"its recipe is not torchao's tensorwise: another {name}"
        for name in ("cast_config_grad_output", "cast_config_grad_output_for_grad_weight"):
            if self._is_other_cast(getattr(config, name), torch.float8_e5m2):
                return f"its recipe is not torchao's tensorwise: another {name}"
        if config.round_scales_to_power_of_2:
            return "its recipe is not torchao's tensorwise: scales are powers of two"
        if config.enable_fsdp_float8_all_gather:
            return "FSDP gathers its weight in FP8"
        # The layer multiplies by these, which were made of its configuration.
        for name in ("output", "grad_input", "grad_weight"):
            product = getattr(products, name)
            if product.emulate:
                return "torchao emulates its products"
            if self._is_other_product(product, is_fast=name == "output"):
                return f"its recipe is not torchao's tensorwise: another product for {name}"
        return self._size_objection(weight)

    def _is_other_cast(self, cast: Any, dtype: torch.dtype) -> bool:
        is_dynamic = cast.scaling_type.value == "dynamic"
        is_tensorwise = cast.scaling_granularity.value == "tensorwise"
        return not is_dynamic or not is_tensorwise or cast.target_dtype != dtype

    def _is_other_product(self, product: Any, is_fast: bool) -> bool:
        return product.use_fast_accum != is_fast or product.fp8_output or product.pad_inner_dim

    def _size_objection(self, weight: Tensor) -> str | None:
        rows, columns = weight.shape
        if rows and columns and rows % 16 == 0 and columns % 16 == 0:
            return None
        return f"its weight is [{rows}, {columns}], and FP8 needs multiples of 16"

    def agree(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Returns whether the operators and torchao give the same dtypes of these."""
        # On a CPU torchao looks at the autocast of GPUs, and nothing casts its input.
        is_cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        if weight.device.type != "cuda" and is_cast:
            return False
        tensors = (input, weight) if bias is None else (input, weight, bias)
        return all(t.dtype in DTYPES and t.device == weight.device for t in tensors)


TENSORWISE = Tensorwise()
