"""What the command lines of `gain` and the benchmarks share."""

from __future__ import annotations

import argparse
from typing import NoReturn

import torch

EXIT_BAD_USAGE = 2


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_USAGE, f"{self.prog}: error: {message}\n")


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
