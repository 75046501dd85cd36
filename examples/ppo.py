"""PPO balances a pole: two small networks in fp32, fused beside plain, where launches are the time.

Reinforcement learning trains small networks on small batches: here an actor 4-64-64-2 and a critic
4-64-64-1, 256 samples at a time. Such a product is done in a microsecond or two, so what a step
takes is the number of kernels, and on the CPU the number of calls. Of one network's step that is

                      plain                                              fused
    forward           addmm, relu, addmm, relu, addmm                    one launch for all layers
    backward          mm, mm and sum of each layer, relu's between       one launch for each layer

on a GPU, if measuring finds these kernels to be the fastest (`plans.show()` says). A CPU has none.

The task is CartPole (Barto, Sutton and Anderson, 1983): push a cart so that its pole stands. On a
GPU a step of play and one of learning are each recorded as a CUDA graph, once plans are made.

Both agents begin with the same weights and random numbers, and both learn. The last bits of their
sums differ, and so what they do later. An episode returns the steps that the pole stood.

    python examples/ppo.py
"""

from __future__ import annotations

import signal
import time
from argparse import ArgumentDefaultsHelpFormatter as WithDefaults
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fused_linear import FusedMLP, explain

HIDDEN, ROUNDS, BATCH, EPOCHS, SEED, MOST_STEPS = 64, 64, 256, 4, 0, 500
DISCOUNT, SMOOTHING, CLIP, RATE = 0.99, 0.95, 0.2, 1e-3


class CartPole:
    """Many carts: states [carts, 4] of position, speed, angle and its speed."""

    def __init__(self, carts: int, device: str) -> None:
        self.state = torch.empty(carts, 4, device=device).uniform_(-0.05, 0.05)
        self.steps = torch.zeros(carts, device=device)

    def step(self, push_right: Tensor) -> tuple[Tensor, Tensor]:
        """Moves every cart, and puts those back that are done. -> done, steps of the episode"""
        _, speed, angle, turning = self.state.unbind(1)
        force = 10.0 * (2 * push_right - 1)
        pull = (force + 0.05 * turning.square() * angle.sin()) / 1.1
        bend = (9.8 * angle.sin() - angle.cos() * pull) / (0.5 * (4 / 3 - angle.cos() ** 2 / 11))
        push = pull - 0.05 * bend * angle.cos() / 1.1
        moved = self.state + 0.02 * torch.stack([speed, push, turning, bend], 1)
        self.steps += 1
        steps = self.steps.clone()
        done = (moved[:, 0].abs() > 2.4) | (moved[:, 2].abs() > 0.2095) | (steps >= MOST_STEPS)
        fresh = torch.empty_like(moved).uniform_(-0.05, 0.05)
        self.state.copy_(torch.where(done[:, None], fresh, moved))
        self.steps *= ~done
        return done, steps


class Agent:
    """An actor, a critic, their optimizer, and what they have seen in the last round of play."""

    def __init__(self, actor: nn.Module, critic: nn.Module, carts: int, device: str) -> None:
        self.actor, self.critic, self.carts = actor, critic, CartPole(carts, device)
        parameters = [*actor.parameters(), *critic.parameters()]
        graphs = device != "cpu"
        self.optimizer = torch.optim.Adam(parameters, lr=RATE, capturable=graphs)
        self.states = torch.zeros(ROUNDS, carts, 4, device=device)
        self.pushes, self.chances, self.done = torch.zeros(3, ROUNDS, carts, device=device)
        self.lengths, self.wins, self.advantages = torch.zeros(3, ROUNDS, carts, device=device)
        self.round = torch.zeros(1, dtype=torch.long, device=device)
        self.batch = torch.arange(BATCH, device=device)
        self.play_once, self.learn_once = self.play_step, self.learn_step
        if graphs:
            self.play_once, self.learn_once = recorded(self.play_step), recorded(self.learn_step)
            self.round.zero_()

    def play_step(self) -> None:
        with torch.no_grad():
            state = self.carts.state.clone()
            chance = self.actor(state).log_softmax(1)
            push = (torch.rand_like(chance[:, 0]) < chance[:, 1].exp()).float()
            done, steps = self.carts.step(push)
            taken = chance.gather(1, push.long()[:, None])[:, 0]
            memories = self.states, self.pushes, self.chances, self.done, self.lengths
            for memory, seen in zip(memories, (state, push, taken, done.float(), steps * done)):
                memory.index_copy_(0, self.round, seen[None])
            self.round.add_(1).remainder_(len(self.states))

    def learn_step(self) -> None:
        """One step of Adam on the samples that self.batch names."""
        states, pushes, chances, wins, advantages = (
            memory.flatten(0, 1)[self.batch]
            for memory in (self.states, self.pushes, self.chances, self.wins, self.advantages)
        )
        now = self.actor(states).log_softmax(1)
        ratio = (now.gather(1, pushes.long()[:, None])[:, 0] - chances).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        gain = torch.minimum(ratio * advantages, clipped * advantages).mean()
        loss = F.mse_loss(self.critic(states)[:, 0], wins) - gain
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def judge(self) -> None:
        """Which rounds were better than the critic thought: generalised advantages."""
        with torch.no_grad():
            worth = self.critic(torch.cat([self.states, self.carts.state[None]]))[..., 0] * 100
            ahead = torch.zeros_like(worth[0])
            for i in reversed(range(len(self.states))):
                on = 1 - self.done[i]
                ahead = 1 + DISCOUNT * on * (worth[i + 1] + SMOOTHING * ahead) - worth[i]
                self.advantages[i] = ahead
            self.wins.copy_((self.advantages + worth[:-1]) / 100)
            self.advantages.sub_(self.advantages.mean()).div_(self.advantages.std() + 1e-8)

    def iterate(self) -> tuple[float, float]:
        """Plays, judges and learns. -> mean return, microseconds for a step of learning"""
        for _ in range(len(self.states)):
            self.play_once()
        self.judge()
        mean_return = float(self.lengths.sum() / self.done.sum().clamp(min=1))  # waits for all
        orders = torch.stack([torch.randperm(self.done.numel()) for _ in range(EPOCHS)])
        batches = orders.view(-1, BATCH).to(self.batch.device)
        begin = time.perf_counter()
        for batch in batches:
            self.batch.copy_(batch)
            self.learn_once()
        self.batch.sum().item()  # waits for the last
        return mean_return, 1e6 * (time.perf_counter() - begin) / len(batches)


def recorded(step: Callable[[], None]) -> Callable[[], None]:
    """Captures the step as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which still fills what the step reads
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def draw(path: Path, returns: dict[str, list[float]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=130)
    axes = figure.subplots()
    for name, some in returns.items():
        axes.plot(range(1, len(some) + 1), some, label=name)
    axes.set(title="PPO on CartPole", xlabel="iteration", ylabel="mean return of an episode")
    axes.legend(frameon=False)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> dict:
    """Runs the example; -> its numbers."""
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=WithDefaults)
    add = parser.add_argument
    add("--iterations", type=int, default=30, help="of play and learning")
    add("--envs", type=int, default=64, help="carts that are played at once")
    add("--out", type=Path, default=Path("example_pictures"), help="folder for the picture")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)

    returns, times = {}, {}
    for name in ("plain", "fused"):
        torch.manual_seed(SEED)
        networks = [FusedMLP(4, HIDDEN, HIDDEN, out, device=given.device) for out in (2, 1)]
        if name == "plain":
            networks = [network.to_sequential() for network in networks]
        agent = Agent(*networks, given.envs, given.device)
        some = [agent.iterate() for _ in range(given.iterations)]
        returns[name], steps = ([pair[i] for pair in some] for i in range(2))
        times[name] = median(steps)
    with explain() as report:
        agent.learn_step()
    print(f"what ran in one step of learning:\n{report}\n")
    print(f"{'iteration':>10}" + "".join(f"{name:>10}" for name in returns))
    for i in range((given.iterations - 1) % 5, given.iterations, 5):
        print(f"{i + 1:>10}" + "".join(f"{some[i]:10.1f}" for some in returns.values()))
    print("a step of learning: " + ", ".join(f"{t:.0f} us {name}" for name, t in times.items()))
    draw(given.out / "ppo.png", returns)
    print(given.out / "ppo.png")
    return {"returns": returns, "times": times, "paths": [call.path for call in report.calls]}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback
    main()
