"""`python -m torch_fused_linear.doctor`: what is installed, what was built, and does it work.

It also runs when the library cannot be loaded.
"""

import argparse
import ctypes
import platform
import sys
from collections.abc import Sequence
from typing import Any

import torch

from torch_fused_linear._support import library


def driver_version() -> str | None:
    """The NVIDIA driver's version, asked of the driver itself."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, len(text)):
        return None
    return text.value.decode()


def cublaslt_version() -> str | None:
    """The version of the cuBLASLt that torch has loaded; None without CUDA."""
    if torch.version.cuda is None:
        return None
    try:
        loaded = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
    loaded.cublasLtGetVersion.restype = ctypes.c_size_t
    number = loaded.cublasLtGetVersion()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def versions() -> dict[str, Any]:
    """Everything that a report of a failure or of a speed should name."""
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    devices = [f"{d.name}, capability {d.major}.{d.minor}" for d in found]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "cublaslt": cublaslt_version(),
        "devices": devices,
    }


def largest_error(device: str) -> float:
    """linear_relu and its gradients against fp64.

    The numbers are few-bit fractions, so fp32, TF32 and any order of summation are exact: a right
    result has no error at all, and pre-activations of exactly 0 are among them.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = (37, 129), (65, 129), (65,), (37, 65)
    numbers = [torch.randint(-4, 5, shape, generator=generator) / 4.0 for shape in shapes]
    *arguments, grad = (n.double() for n in numbers)

    wanted = [t.clone().requires_grad_() for t in arguments]
    expected = torch.relu(torch.nn.functional.linear(*wanted))
    expected.backward(grad)

    given = [t.to(device, torch.float32).requires_grad_() for t in arguments]
    result = torch.ops.fused.linear_relu(*given)
    result.backward(grad.to(result))

    pairs = [(result, expected)] + [(g.grad, w.grad) for g, w in zip(given, wanted)]
    return max((got.cpu().double() - want).abs().max().item() for got, want in pairs)


def onednn_path() -> str:
    if not torch.backends.mkldnn.is_available():
        return "not in this torch"
    ops = torch.ops.mkldnn
    half = {"bfloat16": ops._is_mkldnn_bf16_supported, "float16": ops._is_mkldnn_fp16_supported}
    return ", ".join(["float32", *(name for name, supported in half.items() if supported())])


def tried(device: str) -> tuple[bool, str]:
    """Tries a layer on the device: tells if it is right, and the verdict in words."""
    try:
        error = largest_error(device)
    except Exception as failure:  # whatever it is, the doctor reports it and goes on
        return False, f"{type(failure).__name__}: {failure}: FAILED"
    return error == 0, f"largest error {error:g}: {'OK' if error == 0 else 'FAILED'}"


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(
        prog="python -m torch_fused_linear.doctor",
        description="Say what is installed, what was built, and whether it works: a layer's "
        "forward and backward on each device, compared with fp64.",
        epilog="Exit status: 0, everything works; 1, something is broken, or there is a GPU that "
        "the build does not use.",
    ).parse_args(arguments)

    def say(name: str, value: object) -> None:
        print(f"{name:<10}", "none" if value is None else value)

    found, built = versions(), library.build_info()
    say("package", library.PACKAGE)
    for name in ("python", "torch", "cuda", "driver", "cublaslt"):
        say(name, found[name])
    for device in found["devices"] or ["cpu only"]:
        say("device", device)

    if library.error is not None:
        say("library", "BROKEN")
        print(library.error)
        return 1
    kind = f"CUDA {built['cuda']} for {built['arch_list']}" if built["cuda"] else "CPU only"
    say("library", f"{kind}, for torch {built['torch']} ({built['why']})")
    if built["cuda"] and "9.0" in built["arch_list"]:
        say("Hopper", f"{'with' if built['hopper'] else 'without'} our own kernels")
    is_direct = not isinstance(library.direct, library._NotDirect)
    slower = "through torch.ops, which is slower: not built for this Python, or without Python.h"
    say("calls", "direct" if is_direct else slower)
    say("oneDNN", onednn_path())
    has_gpu = torch.cuda.is_available()
    usable = "available" if has_gpu else "built, but there is no CUDA device"
    say("cuBLASLt", usable if built["cuda"] else "not built")

    working = built["cuda"] is not None or not has_gpu
    if not working:
        say("cuda", "a GPU is here that this build does not use: FAILED")
        say("to build", library.how_to_rebuild())
    for device in ["cpu", *["cuda"] * (built["cuda"] is not None and has_gpu)]:
        is_right, verdict = tried(device)
        say(device, f"linear_relu, forward and backward, {verdict}")
        working = working and is_right
    return 0 if working else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # as shells report Ctrl-C
