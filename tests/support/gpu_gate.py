"""The gate of speed: no shape of the benchmark's grid may be slower than eager by more than 2 %.

It is measured in the process of whoever asks, with plans as users have them. Small shapes are bound
by the CPU, whose times vary by more than that; so whatever looks slower is measured again, and
fails only if it is slower every time.
"""

import torch

from benchmarks import machine, results
from benchmarks.cases import SUITES, cases_of
from benchmarks.run import entrants, measure_case
from torch_fused_linear import plans

GRID = ("layer", "ffn", "mlp-small")
SECONDS = 0.15
REPEATS = 3
LISTED = 12


def measured(case, device):
    """The record of one case."""
    names = entrants(case, [*SUITES[case.suite].ours, "eager"], device)
    return measure_case(case, names, device, SECONDS)


def grid(json=None):
    """The records of the suites; kept in the file `json` as they come, if one is named."""
    device = torch.device("cuda")
    machine.warm_up(device)
    header = machine.header(device, ["make gpu-test"])
    records = []
    for suite in GRID:
        for case in cases_of(suite, device):
            records.append(measured(case, device))
            if json is not None:
                results.save(json, header, records)
    return records


def measured_again(case, name):
    return measure_case(case, [name, "eager"], torch.device("cuda"), SECONDS).speedup(name) or 0.0


def judge(records, again=measured_again):
    """The verdict on records of the grid: how many, the worst ratios, and which are below."""
    ratios = {}
    for record in records:
        for name in SUITES[record.case.suite].ours:
            if name in record.failed:
                ratios[f"{record.case} {name}"] = 0.0
            elif (ratio := record.speedup(name)) is not None:
                for _ in range(REPEATS):
                    if ratio >= results.LOSS:
                        break
                    ratio = max(ratio, again(record.case, name))
                ratios[f"{record.case} {name}"] = ratio
    worst = sorted(ratios.items(), key=lambda item: item[1])
    return {
        "measured": len(ratios),
        "worst_ratios": {label: round(ratio, 3) for label, ratio in worst[:LISTED]},
        "below": [label for label, ratio in worst if ratio < results.LOSS],
    }


def run(json=None):
    """The verdict on the grid as it is here and now."""
    with plans.budget(200):
        return judge(grid(json))
