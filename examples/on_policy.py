"""A policy generates tokens in one batch and is trained on them in others: are they the same bits?

A tiny language model of one attention layer and a gated block generates token by token, with a
batch that gets smaller. Then the log-probabilities of the same tokens are computed as training
does: all positions at once, in other batches. Under the policy "batch_invariant" they are equal to
the bit, and without it, as a rule, they are not.

Every product is an operator of this package. What stands between them must not depend on the batch
either: see `row_sums` and `attend`.

    python examples/on_policy.py

A CPU cannot hold the policy: there the example says so, and shows the difference alone.
"""

from __future__ import annotations

import signal
from argparse import ArgumentDefaultsHelpFormatter as WithDefaults
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.nn.functional as F

import torch_fused_linear as tfl

WORDS, WIDTH, HIDDEN, PROMPTS, LENGTH = 64, 128, 352, 24, 12


def row_sums(x):
    """torch.sum reduces in an order that goes by the number of rows; a product does not."""
    return tfl.linear(x, x.new_ones(1, x.shape[-1]))


def norm(x):
    return x * torch.rsqrt(row_sums(x * x) / x.shape[-1] + 1e-6)


def attend(q, keys, values):
    """Key after key: softmax and bmm would sum in an order that goes by the length and the batch.
    Exponentials of bounded scores need no maximum."""
    total, weighted = 0, 0
    for k, v in zip(keys, values, strict=True):
        weight = torch.exp(torch.tanh(row_sums(q * k) / WIDTH**0.5))
        total, weighted = total + weight, weighted + weight * v
    return weighted / total


def parameters(device):
    torch.manual_seed(0)
    shapes = {"embed": (WORDS, WIDTH), "qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
    shapes |= {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    shapes |= {"head": (WORDS, WIDTH)}
    return {n: (torch.randn(s) / s[-1] ** 0.5).to(device) for n, s in shapes.items()}


def log_probabilities(w, tokens):
    """[batch, length] -> log-probabilities of every next token, [batch, length, WORDS]."""
    x = w["embed"][tokens]
    q, k, v = tfl.linear(norm(x), w["qkv"]).chunk(3, -1)
    keys, values = k.unbind(1), v.unbind(1)
    mixed = [attend(q[:, t], keys[: t + 1], values[: t + 1]) for t in range(tokens.shape[1])]
    x = x + tfl.linear(torch.stack(mixed, 1), w["out"])
    x = x + tfl.gated_mlp(norm(x), w["gate"], w["up"], w["down"], activation="silu")
    logits = tfl.linear(norm(x), w["head"])
    return logits - torch.log(row_sums(torch.exp(logits)))


@torch.no_grad()
def generate(w, device):
    """Sequences end after different times, so that the batch shrinks. -> tokens, log-probs."""
    tokens = torch.arange(PROMPTS, device=device).unsqueeze(1) % WORDS
    said = torch.zeros(PROMPTS, LENGTH, device=device)
    for t in range(LENGTH):
        going = PROMPTS - t
        log_p = log_probabilities(w, tokens[:going])[:, -1]
        chosen = torch.zeros(PROMPTS, 1, dtype=torch.long, device=device)
        chosen[:going, 0] = log_p.argmax(-1)
        said[:going, t] = log_p.gather(1, chosen[:going])[:, 0]
        tokens = torch.cat([tokens, chosen], 1)
    return tokens, said


def trained_on(w, tokens, batch):
    """The tokens' log-probabilities with gradients, `batch` sequences at a time."""
    parts = []
    for part in tokens.split(batch):
        log_p = log_probabilities(w, part[:, :-1])
        parts.append(log_p.gather(2, part[:, 1:, None])[..., 0])
    loss = F.mse_loss(torch.cat(parts), torch.zeros_like(tokens[:, 1:], dtype=torch.float32))
    loss.backward()
    return torch.cat(parts).detach()


def differences(policy, device):
    with tfl.set_policy(policy):
        w = parameters(device)
        tokens, said = generate(w, device)
        for value in w.values():
            value.requires_grad_()
        going = torch.arange(LENGTH, device=device) < (PROMPTS - torch.arange(PROMPTS)[:, None]).to(
            device
        )
        return {b: int((trained_on(w, tokens, b) != said)[going].sum()) for b in (1, 7, PROMPTS)}


def main(arguments: list[str] | None = None) -> dict:
    """Runs the example; -> for each policy that holds here, how many numbers differ by batch."""
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=WithDefaults)
    add = parser.add_argument
    add("--out", type=Path, default=Path("example_pictures"), help="not used: it draws nothing")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    given = parser.parse_args(arguments)
    found = {}
    for policy in ("auto", "batch_invariant"):
        try:
            counts = differences(policy, given.device)
        except NotImplementedError as why:
            print(f"{policy}: not held here. {why}")
            continue
        found[policy] = counts
        for batch, count in counts.items():
            print(f"{policy}: trained {batch} at a time, {count} log-probabilities differ")
        if policy == "batch_invariant":
            assert not any(counts.values())
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback
    main()
