"""Networks of every layer: one of vectors, one of images, for what takes whole models."""

import torch
from torch import Tensor, nn

import torch_fused_linear as tfl


class Stacked(nn.Linear):
    """Gate and up in one weight."""

    def forward(self, x: Tensor) -> Tensor:
        return tfl.linear_glu(x, self.weight, None, self.bias, activation="relu")


def vectors(memory: str = "default") -> nn.Sequential:
    """[*, 6] -> [*, 3], with every operator of linear layers."""
    low = {"memory": memory}
    return nn.Sequential(
        tfl.FusedLinearReLU(6, 9, **low),
        tfl.FusedLinearReLU(9, 8, bias=False),
        tfl.FusedLinearGELU(8, 8, **low),
        tfl.FusedLinearGELU(8, 7, approximate="none", bias=False, **low),
        tfl.FusedLinear(7, 8),
        tfl.FusedLinearSiLU(8, 8, **low),
        tfl.FusedLinearReLU2(8, 8, **low),
        tfl.FusedMLP(8, 9, 12, 8, **low),
        tfl.FusedMLP(8, 9, 8, activation="gelu_erf", bias=False, **low),
        tfl.FusedMLP(8, 9, 5, activation="gelu_tanh", **low),
        tfl.FusedGatedMLP(5, 8, **low),
        tfl.FusedGatedMLP(5, 8, bias=True, activation="gelu_erf", **low),
        Stacked(5, 6),
        tfl.FusedLinear(3, 3, bias=False),
    )


class Images(nn.Module):
    """[*, 4, 9, 8] -> [*, 5], with every argument of the convolution, given and left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            tfl.FusedConv2dReLU(4, 8, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
            tfl.FusedConv2dReLU(8, 6, 3, groups=2, padding="same", bias=False),
            tfl.FusedConv2dReLU(6, 6, 3, padding=1, padding_mode="circular"),
        )
        self.weight = nn.Parameter(torch.randn(5, 6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.fused.conv2d_relu(self.layers(x), self.weight).mean((-1, -2))


# How it is made, and the sizes of an input behind the batch.
NETWORKS = {
    "vectors": (vectors, (6,)),
    "low memory": (lambda: vectors("low"), (6,)),
    "images": (Images, (4, 9, 8)),
}
# The operators of each, in order.
OPERATORS = {
    "vectors": [
        *("linear_relu", "linear_relu", "linear_gelu", "linear_gelu", "linear", "linear_silu"),
        *("linear_relu2", "mlp", "mlp", "mlp", "gated_mlp", "gated_mlp", "linear_glu", "linear"),
    ],
    "images": ["conv2d_relu"] * 4,
}
OPERATORS["low memory"] = OPERATORS["vectors"]


def network(name: str, device="cpu", dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name][0]().to(device, dtype)


def batch(name: str, *lead: int, device="cpu", dtype=torch.float32, seed=1) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    sizes = (*lead, *NETWORKS[name][1])
    return torch.randn(sizes, generator=gen, dtype=torch.float64).to(device, dtype)
