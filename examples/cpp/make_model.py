"""Makes what `scripted` trains: model.pt (TorchScript) and data.pt, in the folder given."""

import sys
from pathlib import Path

import torch

from torch_fused_linear import FusedLinear, FusedLinearGELU, FusedLinearReLU, FusedMLP


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        FusedLinearReLU(8, 32),
        FusedMLP(32, 64, 32, activation="gelu_tanh"),
        FusedLinearGELU(32, 16, approximate="none"),
        FusedLinear(16, 4),
    )


def make_data() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=generator)
    return {"x": x, "target": torch.tanh(x @ torch.randn(8, 4, generator=generator))}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make_model.py FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.jit.script(make_model()).save(folder / "model.pt")
    torch.save(make_data(), folder / "data.pt")
