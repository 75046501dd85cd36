"""Files of plans, written by hand."""

from dataclasses import dataclass

import torch_fused_linear as tfl
from torch_fused_linear import plans

HEADER = 4  # lines
ALGORITHM = slice(26, 34)  # of a plan's words
PASSES = ("fprop", "dgrad", "wgrad", "activation", "gating", "glu")
ACTIVATIONS = ("none", "relu", "gelu_tanh", "gelu_erf", "silu")


def file_text(body="torch_fused_linear plans 1\ngpu GPU A\ncublaslt 130100\n"):
    hash = 0xCBF29CE484222325  # FNV-1a
    for byte in body.encode():
        hash = (hash ^ byte) * 0x100000001B3 % 2**64
    return f"{body}checksum {hash:x}\n"


@dataclass(frozen=True)
class Plan:
    """What a line of the file is for."""

    what: str
    activation: str
    mask: bool


def write_forced(step, path, strategy, takes, algorithm=0):
    """A file of step's plans, as they are measured, where those that `takes` says yes to are of
    that strategy."""
    plans.clear()
    step()
    plans.save(path)
    *lines, _ = path.read_text().splitlines()
    for i, line in enumerate(lines[HEADER:], HEADER):
        words = line.split(" ")
        if takes(Plan(PASSES[int(words[1])], ACTIVATIONS[int(words[2])], words[5] != "0")):
            words[0], words[ALGORITHM] = strategy, [str(algorithm), *"0000000"]
            lines[i] = " ".join(words)
    path.write_text(file_text("\n".join([*lines, ""])))
    plans.clear()


def run_with(path, step):
    """What step gives by the plans of a file, and the paths it takes."""
    plans.clear()
    plans.load(path)
    with tfl.explain() as report:
        result = step()
    return result, [call.path for call in report.calls]


def run_forced(step, folder, strategy, takes, algorithm=0):
    """What step gives, and the paths it takes, when its plans that `takes` says yes to are of that
    strategy."""
    write_forced(step, folder / "plans", strategy, takes, algorithm)
    return run_with(folder / "plans", step)
