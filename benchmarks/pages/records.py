"""The tables of docs/reliability.md, of the records in tests."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from .results import table

ROOT = Path(__file__).resolve().parents[2]
ORDER = ("fuzz", "faults", "soak", "torch", "configs", "sanitizers", "speed")
GRADIENTS = {"output": "output", "grad_input": "input's gradient"}
GRADIENTS |= {"grad_weight": "weight's", "grad_bias": "bias's"}

Record = dict


def load(folder: Path) -> list[Record]:
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(records, key=lambda r: (ORDER.index(r["part"]), r["machine"], r["date"]))


def of_part(name: str, records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r["part"] == name and r["done"]]


def tree(record: Record) -> str:
    return f"`{record['tree_hash'][:12]}`"


def where(record: Record) -> str:
    return f"{record['machine']}, torch {record['torch']}, {record['date'][:10]}, {tree(record)}"


def below(record: Record, lines: Sequence[str]) -> list[str]:
    return [f"{where(record)}:", "", *lines, ""]


def how_often(record: Record) -> str:
    done, asked, unit = record["done"], record["asked"]["count"], record["unit"]
    return f"{done:,} {unit}" if done == asked else f"{done:,} of {asked:,} {unit}, then stopped"


def overview(records: Sequence[Record]) -> list[str]:
    rows = []
    for r in records:
        name = r["part"] + (", measured plans" if r["asked"]["measured"] else "")
        wrong = r["failed"] + len(r["crashed"]) + len(r["verdict"])
        seconds = f"{r['seconds'] / 60:.0f} min"
        machine = f"{r['machine']}, torch {r['torch']}"
        about = f"seed {r['asked']['seed']}: {how_often(r)}"
        rows.append([name, about, machine, r["date"][:10], tree(r), seconds, str(wrong)])
    return table(["part", "tried", "machine", "date", "tree", "took", "found wrong"], rows, words=6)


def fuzz(records: Sequence[Record]) -> list[str]:
    """For each machine, policy and dtype: how often ours and how often eager was worse."""

    def ratio(counts: dict, dtype: str, name: str) -> str:
        sums = counts["results"].get(name)
        if dtype == "float64" or not sums or not sums["eager"]:
            return ""
        return f"{math.sqrt(sums['ours'] / sums['eager']):.3f}"

    lines = []
    for r in of_part("fuzz", records):
        rows = [
            [f"{policy}, {dtype}"]
            + [str(counts[key]) for key in ("cases", "ours worse", "eager worse")]
            + [ratio(counts, dtype, name) for name in GRADIENTS]
            for policy, dtypes in r["found"]["by"].items()
            for dtype, counts in dtypes.items()
        ]
        head = ["policy, dtype", "cases", "ours worse", "eager worse", *GRADIENTS.values()]
        lines += below(r, table(head, sorted(rows), words=1))
        if crashed := r.get("torch_crashed"):
            lines += [f"Plain torch ended the process: {', '.join(crashed)}.", ""]
    return lines[:-1]


def faults(records: Sequence[Record]) -> list[str]:
    head = ["call", "failed", "a clear error", "right all the same"]
    lines = []
    for r in of_part("faults", records):
        counts = [r["found"].get(k, {}) for k in ("failed calls", "errors", "right all the same")]
        rows = [
            [name if " " in name else f"`{name}`", *(str(c.get(name, "")) for c in counts)]
            for name in counts[0]
        ]
        lines += below(r, table(head, rows, words=1))
    return lines[:-1]


def soak(records: Sequence[Record]) -> list[str]:
    lines = []
    for r in of_part("soak", records):
        memory = [m / 2**20 for m in r["found"]["memory"]]
        quarter = max(1, len(memory) // 4)
        settled = max(memory[quarter : 2 * quarter] or memory)
        lines.append(
            f"- {where(r)}: {how_often(r)}, {r['found']['steps']:,} steps of "
            f"{r['found']['rounds']:,} rounds of models; at most {settled:.0f} MiB in use in the "
            f"second quarter, at least {min(memory[-quarter:]):.0f} in the last."
        )
    return lines


def wrong(records: Sequence[Record]) -> list[str]:
    """The failures in the records, a line each."""
    lines = []
    for r in records:
        label = f"{r['part']}, {r['machine']}"
        lines += [f"- {label}, {f['unit']}: {f['what']}" for f in r["failures"][:20]]
        lines += [f"- {label}, {unit}: ended by {how}" for unit, how in r["crashed"].items()]
        lines += [f"- {label}: {text}" for text in r["verdict"]]
    return [re.sub(r"([\[\]<>*_|])", r"\\\1", line) for line in lines] or ["Nothing."]


def elsewhere(records: Sequence[Record]) -> list[str]:
    """The counts of the suite's own files: models, random graphs, the GPU."""
    zoo = json.loads((ROOT / "tests/fuse/model_zoo.json").read_text())
    lines = [
        f"- {library} {zoo['versions'][library]}: {counts['models']} models; of "
        f"{counts['forward equal']} the forward, of {counts['step equal']} a training step "
        f"compared equal after `fuse_`, which had fused {counts['blocks fused']} blocks in "
        f"{counts['with blocks fused']} of them; {counts['skipped']} could not be built or "
        f"run small; {counts['wrong']} were wrong."
        for library, counts in zoo["counts"].items()
        if counts["models"]
    ]
    source = (ROOT / "tests/autograd/test_random_graphs.py").read_text()
    threads, _, graphs = re.search(r"^THREADS, CHUNK, GRAPHS = (.*)", source, re.M)[1].split(", ")
    lines.append(
        f"- {int(graphs):,} random graphs in {threads} threads, equal to plain torch's, at each "
        "run of the suite."
    )
    gpu = json.loads((ROOT / "tests/gpu_record.json").read_text())
    speed = "its gate of speed was not run."
    if gpu["speed"]["measured"]:
        speed = (
            f"{gpu['speed']['measured']} times measured, {len(gpu['speed']['below'])} of them "
            "slower than eager by more than 2 %."
        )
    lines.append(
        f"- The whole suite on {gpu['devices'][0]}, {gpu['date'][:10]}, tree {tree(gpu)}: "
        f"{gpu['passed']:,} passed, {gpu['failed']} failed, {gpu['skipped']} skipped; {speed}"
    )
    return lines


def checks(records: Sequence[Record]) -> list[str]:
    tables, said = [], []
    for r in of_part("torch", records):
        rows = [[name, str(count)] for name, count in r["found"]["checks"].items()]
        tables += below(r, table(["check", "times"], rows, words=1))
    for r in of_part("configs", records):
        found = r["found"]
        replaced = ", ".join(f"`{name}` {n}" for name, n in sorted(found["replaced"].items()))
        of_torch = found.get("plain torch fails, too", {})
        said.append(
            f"Configurations of Inductor, {where(r)}: {r['done']}, each of "
            f"{found['options'] / r['done']:.0f} changed options on average; {found['right']} "
            f"right, {r['failed']} wrong, {sum(of_torch.values())} under which plain torch fails "
            f"as well. Our pass put in {replaced}."
        )
    for r in of_part("sanitizers", records):
        clean = ", ".join(f"{tool} {n}" for tool, n in r["found"].get("clean", {}).items())
        said.append(f"Sanitizers, programs and calls that were clean, {where(r)}: {clean}.")
    for r in of_part("speed", records):
        found = r["found"]
        said.append(
            f"Speed of random shapes, {where(r)}: {found['below']} of {found['measured']} below "
            f"0.98 of eager's; the worst {min(found['ratios'])}."
        )
    return [*tables, "\n\n".join(said)]


SECTIONS: dict[str, Callable[[Sequence[Record]], list[str]]] = {
    "overview": overview,
    "fuzz": fuzz,
    "faults": faults,
    "soak": soak,
    "checks": checks,
    "elsewhere": elsewhere,
    "wrong": wrong,
}
