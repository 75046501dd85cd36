"""What the command lines of `gain` and the benchmarks share."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

EXIT_BAD_USAGE = 2
EXIT_INTERRUPTED = 130


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_USAGE, f"{self.prog}: error: {message}\n")


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """An argument type: finite numbers of `kind` above zero."""

    def convert(text: str) -> float:
        value = kind(text)
        if not (math.isfinite(value) and value > 0):
            raise argparse.ArgumentTypeError(f"must be above zero, got {text}")
        return value

    convert.__name__ = kind.__name__  # argparse names it where `kind` refuses the text
    return convert


def chosen_device(text: str | None) -> torch.device:
    """The device named `text`, or the best one; ValueError says why it cannot be used."""
    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ValueError(f"unknown device {text!r}; use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {text!r} is not supported; use cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device {text!r}: PyTorch finds no CUDA GPU here; use --device cpu")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device {text!r}: there are {torch.cuda.device_count()} GPUs")
    return device


def output_directory(path: Path) -> Path:
    """`path`, made if need be; ValueError if nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ValueError(f"--out {path}: not a directory") from None
    except OSError as error:
        raise ValueError(f"--out {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"--out {path}: not writable")
    return path
