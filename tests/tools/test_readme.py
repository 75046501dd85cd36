"""README's numbers are those of the results."""

import re

import pytest
from processes import ROOT
from test_docs import FENCE, PAGES

from benchmarks.gated import SIZES
from benchmarks.pages.everything import times_compiled
from benchmarks.pages.expect import WAYS, ratio
from benchmarks.pages.results import by_machine, duration, find

README = (ROOT / "README.md").read_text()
TEXT = " ".join(FENCE.sub("", README).split())
RESULTS = by_machine(sorted((ROOT / "benchmarks" / "results").glob("*.json")))["NVIDIA H200"]


def median(name, **case):
    (result,) = find(RESULTS, **case)
    return result["numbers"][name]["median"]


def times(theirs, ours, **case):
    return f"{median(theirs, **case) / median(ours, **case):.2f}"


def of_model(name, activation, mode, theirs="eager", ours="fused"):
    return times(theirs, ours, suite="models", model=name, activation=activation, mode=mode)


def block(width):
    case = {"suite": "ffn", "sizes": [width, 4 * width, width], "tokens": 8192}
    return case | {"dtype": "bf16", "activation": "relu", "mode": "step"}


def rivals_graph(width):
    return block(width) | {"suite": "rivals", "activation": "gelu", "mode": "graph"}


def of_compiled_block(width, tokens=8192):
    """The fastest of torch.compile's modes, as in the table."""
    return times_compiled(*find(RESULTS, **block(width) | {"tokens": tokens}))


def of_pass(model, activation):
    """A compiled step beside one with our pass, as in the table."""
    found = find(RESULTS, suite="models", model=model, activation=activation, mode="step")
    return ratio(found, WAYS["our pass"], WAYS["compile"])


def step_of_gpt2(name):
    return duration(median(name, suite="models", model="GPT-2 small", dtype="bf16", mode="step"))


def gated_step(width, theirs, suite="gated"):
    (sizes,) = (list(sizes) for sizes in SIZES if sizes[0] == width)
    return times(theirs, "ours", suite=suite, sizes=sizes, tokens=8192, mode="step")


def of_float8(sizes, mode="step, captured"):
    return times("torchao", "ours", suite="float8", sizes=[*sizes, sizes[0]], mode=mode)


LLAMA = "LLaMA, 16 layers"
LAYER = {"sizes": [4096, 16384], "tokens": 8192, "dtype": "bf16", "activation": "gelu-erf"}
# Each sentence with measured numbers, these as groups, and what the results say.
CLAIMS = [
    (
        r"BERT gains ([\d.]+) in inference and ([\d.]+) in a training step, ViT ([\d.]+) and "
        r"([\d.]+)\.",
        *(of_model("BERT-base", "gelu-erf", mode) for mode in ("forward", "step")),
        *(of_model("ViT-B/16", "gelu-erf", mode) for mode in ("forward", "step")),
    ),
    (r"A step of 4096→16384→4096 gains ([\d.]+);", times("eager", "ours", **block(4096))),
    (
        r"a step of one layer 4096→16384 with GELU by erf in bf16 gains ([\d.]+)\.",
        times("eager", "ours", suite="layer", mode="step", **LAYER),
    ),
    (
        r"a LLaMA \(16 layers, 2048→5632\) gains ([\d.]+) after `fuse_` and ([\d.]+) with our "
        r"pass, because the GPU is at its power limit\. `fuse_` saves memory there: the backward "
        r"keeps ([\d.]+) of what eager keeps",
        *(of_model(LLAMA, "silu", "step"), of_pass(LLAMA, "silu")),
        times("fused", "eager", suite="memory-models", model=LLAMA, mode="saved"),
    ),
    (
        r"GPT-2 small takes ([\d.]+ ms) after `fuse_`; in CUDA graphs it takes ([\d.]+ ms) with "
        r"`torch.compile` and ([\d.]+ ms) with our pass\.",
        *map(step_of_gpt2, ("fused", "reduce-overhead", "reduce-overhead+pass")),
    ),
    (
        r"ResNet-50 with folded normalisations gains ([\d.]+) after `fuse_`",
        of_model("ResNet-50, folded", "relu", "forward"),
    ),
    (
        r"takes ([\d.]+) times ours \(768→3072→768, without CUDA graphs\) to ([\d.]+) "
        r"\(4096→16384→4096\), with 65536 tokens ([\d.]+) to ([\d.]+); a transformer's step, "
        r"in its faster mode, takes ([\d.]+) \(ViT\) to ([\d.]+) \(LLaMA\) times as long as with "
        r"our pass",
        *(of_compiled_block(w, tokens) for tokens in (8192, 65536) for w in (768, 4096)),
        *(of_pass("ViT-B/16", "gelu-erf"), of_pass(LLAMA, "silu")),
    ),
    (
        r"GELU fused, in a CUDA graph, takes ([\d.]+) times ours \(768→3072→768\) to ([\d.]+) "
        r"\(4096→16384→4096\)",
        *(times("flash-attn-fused", "ours", **rivals_graph(width)) for width in (768, 4096)),
    ),
    (
        r"the same step takes ([\d.]+) times ours \(768→3072→768\) to ([\d.]+) "
        r"\(4096→16384→4096\)",
        *(times("apex", "ours", **rivals_graph(width)) for width in (768, 4096)),
    ),
    (
        r"a block's step in FP8, in a CUDA graph, takes ([\d.]+) times ours \(1024→4096→1024\) to "
        r"([\d.]+) \(4096→16384→4096\), a gated block's ([\d.]+) \(2048→5632→2048\), whose kernels "
        r"alone take ([\d.]+) \|",
        *map(of_float8, ((1024, 4096), (4096, 16384), (2048, 5632))),
        of_float8((2048, 5632), "kernels"),
    ),
    (
        r"untuned, takes ([\d.]+) times ours \(1024→4096→1024, 65536 tokens\) to ([\d.]+) "
        r"\(4096→16384→4096\), tuned ([\d.]+);",
        times("quack", "ours", **block(1024) | {"suite": "rivals", "tokens": 65536}),
        times("quack", "ours", **block(4096) | {"suite": "rivals"}),
        times("quack-tuned", "ours", **block(4096) | {"suite": "rivals"}),
    ),
    (
        r"interleaved weights, ([\d.]+) \(2048→5632→2048\) to ([\d.]+) \(4096→14336→4096\), CODA's "
        r"([\d.]+) to ([\d.]+) \|",
        *(gated_step(w, o, "gated-coda") for o in ("quack-tuned", "coda") for w in (2048, 4096)),
    ),
    (
        r"gated block's step takes ([\d.]+) times ours \(1024→2816→1024\) to ([\d.]+) \(4096→14336",
        *(gated_step(width, "liger") for width in (1024, 4096)),
    ),
]
# Numbers with a point that are no results: versions, a GPU's capability, and the contract's bound.
NO_RESULTS = {"2.11", "2.15", "3.10", "3.11", "3.14", "13.0", "7.5", "0.2", "1.1"}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim[0][:40])
def test_a_number_is_what_the_results_say(claim):
    sentence, *expected = claim
    found = re.search(sentence, TEXT)
    assert found, "README does not say this any more"
    assert list(found.groups()) == expected


def test_no_other_numbers_are_in_the_readme():
    rest = TEXT
    for sentence, *_ in CLAIMS:
        rest = re.sub(sentence, "", rest)
    found = set(re.findall(r"\d+\.\d+", rest)) | set(re.findall(r"[\d.]+ ?(?:%|µs|us\b)", rest))
    assert found <= NO_RESULTS, found - NO_RESULTS


def everybody(result):
    """Who took part, then or before."""
    return {*result["numbers"], *(everybody(result["before"]) if result["before"] else ())}


def test_only_what_the_results_have_is_called_measured():
    """The table of rivals: who has a number beside ours took part, and nobody else did."""
    section = README.partition("## Compared with")[2].partition("\n## ")[0]
    rows = [[c.strip(" `") for c in r.split("|")[1:-1]] for r in section.splitlines() if "|" in r]
    tried = {name for result in RESULTS for name in everybody(result)}
    contenders = {"torch.compile": {"compile", "max-autotune"}}
    assert len(rows) == 2 + 7
    for name, _, _, beside in rows[2:]:
        word = re.split(r"[ `,-]", name.lower())[0]
        took_part = contenders.get(name, {other for other in tried if word in other})
        assert took_part <= tried
        assert bool(took_part) == ("times ours" in beside), name
        assert took_part or beside == "not measured here", name


def test_drop_in_is_not_said_without_gelus_default():
    """`nn.GELU()` and the default of `FusedLinearGELU` are two functions."""
    for path in [*PAGES, *(ROOT / "torch_fused_linear").rglob("*.py"), *ROOT.glob("docs/*.rst")]:
        for paragraph in re.split(r"\n\s*\n", path.read_text()):
            said = re.search(r"drop-in", paragraph, re.IGNORECASE)
            assert not said or "approximate=" in paragraph, f"{path}: {paragraph}"
