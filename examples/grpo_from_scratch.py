"""GRPO from scratch on CartPole-v1, in one file: PyTorch, NumPy, Gymnasium and nothing else.

A policy plays four episodes from the same start. Episodes that did better than the others become more likely, the
others less. That is GRPO. PPO uses a critic instead of the comparison.

    python grpo_from_scratch.py                             # 100,000 steps, then 100 greedy episodes as a test
    python grpo_from_scratch.py --variant outcome --seed 1  # another rule of credit; also --algorithm ppo, --help
"""

import argparse
import copy
import math
import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

EPS = 1e-4  # added to every deviation we divide by, so that float noise in equal returns does not become +-1
TEST_SEEDS = 2**30  # starts of training come from seeds below, those of the test from seeds above
# where the algorithms' defaults differ: REINFORCE takes one gradient step on each batch, and so a longer one
DEFAULTS = {"grpo": {"gamma": 1.0}, "ppo": {}, "reinforce": {"epochs": 1, "minibatch": 10**9, "learning_rate": 1e-2}}


def network(inputs: int, outputs: int, last_gain: float) -> nn.Sequential:
    """Return an MLP 64-64 with tanh; a small gain of the last layer makes the first policy undecided."""
    layers = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer, gain in zip(layers[::2], (math.sqrt(2), math.sqrt(2), last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


# ------------------------------------------------------------------------------------------------- the episodes
@dataclass
class Group:
    """Episodes from one start, side by side: G members, padded to the T steps of the longest."""

    obs: Tensor  #        [G, T+1, 4]  what the member saw; after its last step, the final observation
    action: Tensor  #     [G, T]
    log_probs: Tensor  #  [G, T, 2]    log pi_old(. | s), of both actions
    reward: Tensor  #     [G, T]       0 once the member's episode is over
    alive: Tensor  #      [G, T]       True where the member still acted
    terminated: Tensor  # [G]          True where a fall ended the episode, False for the time limit


@torch.no_grad()
def play(envs: list[gym.Env], seeds: list[int], actor: nn.Module, greedy: bool = False) -> Group:
    """Play an episode in each environment. Equal seeds give equal starts; each member samples its own actions."""
    obs = np.stack([env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)])
    running, terminated = np.ones(len(envs), bool), np.zeros(len(envs), bool)
    all_obs, steps = [obs], []
    while running.any():
        log_probs = actor(torch.from_numpy(obs)).log_softmax(-1)
        action = log_probs.argmax(-1) if greedy else torch.multinomial(log_probs.exp(), 1)[:, 0]  # a_i ~ pi_old(.|s_i)
        obs, alive, reward = obs.copy(), running.copy(), np.zeros(len(envs), np.float32)
        for i in np.flatnonzero(running):
            obs[i], reward[i], terminated[i], truncated, _ = envs[i].step(action[i].item())
            running[i] = not (terminated[i] or truncated)
        all_obs.append(obs)
        steps.append((action, log_probs, torch.from_numpy(reward), torch.from_numpy(alive)))
    columns = (torch.stack(column, dim=1) for column in zip(*steps, strict=True))
    return Group(torch.from_numpy(np.stack(all_obs, axis=1)), *columns, torch.from_numpy(terminated))


# --------------------------------------------------------------------------------------- credit: who did better?
def returns(reward: Tensor, gamma: float) -> Tensor:
    """Return the discounted reward from each step on, [G, T]."""
    total = reward.clone()
    for t in reversed(range(reward.shape[1] - 1)):
        total[:, t] += gamma * total[:, t + 1]  #                     R_t = r_t + gamma R_{t+1}
    return total


def normalise(x: Tensor, alive: Tensor, over: tuple[int, ...]) -> Tensor:
    """Return ``(x - mean) / std`` where alive, over the live entries along the dimensions `over`; 0 elsewhere."""
    count = alive.sum(over, keepdim=True).clamp(min=1)
    centred = (x - (x * alive).sum(over, keepdim=True) / count) * alive
    return centred / ((centred.square().sum(over, keepdim=True) / count).sqrt() + EPS)


def outcome(reward: Tensor, alive: Tensor, gamma: float) -> Tensor:
    """DeepSeek's GRPO: an episode has one score, and all of its steps get the same advantage."""
    score = returns(reward, gamma)[:, :1]  #                          R_i = sum_t gamma^t r_it
    return normalise(score, alive[:, :1], over=(0,)) * alive  #       A_it = (R_i - mean_j R_j) / std_j R_j


def return_to_go(reward: Tensor, alive: Tensor, gamma: float) -> Tensor:
    """Credit for future rewards only. Late steps, with few rewards left, are compared with early ones."""
    return normalise(returns(reward, gamma), alive, over=(0, 1))  #   A_it = (R_it - mean_jk R_jk) / std_jk R_jk


def per_step(reward: Tensor, alive: Tensor, gamma: float) -> Tensor:
    """Each step is compared with the same step of the members that are still alive."""
    return normalise(returns(reward, gamma), alive, over=(0,))  #     A_it = (R_it - mean_j R_jt) / std_j R_jt


def leave_one_out(reward: Tensor, alive: Tensor, gamma: float) -> Tensor:
    """Each step is compared with all other members; ended ones count as 0."""
    total = returns(reward, gamma)  # 0 after the end
    others = (total.sum(0) - total) / (len(total) - 1)  #             b_it = mean of R_jt over all j but i
    return (total - others) * alive  #                                A_it = R_it - b_it


def gae(group: Group, value: Tensor, gamma: float, gae_lambda: float = 0.95) -> Tensor:
    """PPO: each step is compared with the prediction of the critic; `value` is V of ``group.obs``, [G, T+1]."""
    last = group.alive & ~torch.cat([group.alive[:, 1:], torch.zeros_like(group.alive[:, :1])], dim=1)
    fell = last & group.terminated[:, None]  # V = 0 after a fall, not after a time limit
    delta = group.reward + gamma * value[:, 1:] * ~fell - value[:, :-1]  #         d_t = r_t + gamma V(s_t+1) - V(s_t)
    for t in reversed(range(delta.shape[1] - 1)):
        delta[:, t] += gamma * gae_lambda * ~last[:, t] * delta[:, t + 1]  #       A_t = d_t + gamma lambda A_t+1
    return delta * group.alive


VARIANTS = {"per_step": per_step, "outcome": outcome, "return_to_go": return_to_go, "leave_one_out": leave_one_out}


@torch.no_grad()
def advantages(groups: list[Group], critic: nn.Module, s: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return the advantage of every live step of the batch and the target of PPO's critic there; both flat."""
    raw = target = torch.cat([returns(g.reward, s.gamma)[g.alive] for g in groups])
    if s.algorithm == "grpo":
        raw = torch.cat([VARIANTS[s.variant](g.reward, g.alive, s.gamma)[g.alive] for g in groups])
        return raw / (raw.std() + EPS) if s.variant == "leave_one_out" else raw, target
    if s.algorithm == "ppo":
        values = [critic(g.obs).squeeze(-1) for g in groups]
        raw = torch.cat([gae(g, value, s.gamma)[g.alive] for g, value in zip(groups, values, strict=True)])
        target = raw + torch.cat([value[:, :-1][g.alive] for g, value in zip(groups, values, strict=True)])
    return (raw - raw.mean()) / (raw.std() + EPS), target


# --------------------------------------------------------------------------------------------------- the update
def update(groups: list[Group], nets: dict[str, nn.Module], optimizer: torch.optim.Adam, s: argparse.Namespace) -> dict:
    """Improve the actor (and PPO's critic) on one batch; return the mean metrics."""
    advantage, target = advantages(groups, nets["critic"], s)
    obs = torch.cat([g.obs[:, :-1][g.alive] for g in groups])
    action = torch.cat([g.action[g.alive] for g in groups])[:, None]
    old_log_prob = torch.cat([g.log_probs[g.alive] for g in groups]).gather(1, action).squeeze(1)
    ref_log_prob = nets["reference"](obs).detach().log_softmax(-1).gather(1, action).squeeze(1)
    rows = []
    for _ in range(s.epochs):
        for index in torch.randperm(len(obs)).tensor_split(math.ceil(len(obs) / s.minibatch)):
            a, log_probs = advantage[index], nets["actor"](obs[index]).log_softmax(-1)
            log_prob = log_probs.gather(1, action[index]).squeeze(1)
            log_ratio = log_prob - old_log_prob[index]
            ratio = log_ratio.exp()  #                                             rho = pi(a|s) / pi_old(a|s)
            objective = torch.minimum(ratio * a, ratio.clamp(1 - s.clip, 1 + s.clip) * a)  # min(rho A, clip(rho) A)
            if s.algorithm == "reinforce":
                objective = log_prob * a  #                                        log pi(a|s) A
            policy_loss = loss = -objective.mean()  #                              mean over the steps, to be minimised
            if s.algorithm == "ppo":  #                                            + (V(s) - V_target)^2 / 2
                loss = loss + (nets["critic"](obs[index]).squeeze(-1) - target[index]).square().mean() / 2
            log_x = ref_log_prob[index] - log_prob  #                              x = pi_ref(a|s) / pi(a|s)
            ref_kl = (log_x.exp() - log_x - 1).mean()  #                           KL(pi || pi_ref) ~ x - log x - 1
            if s.kl_coef > 0:  #                                                   + beta KL(pi || pi_ref)
                loss = loss + s.kl_coef * ref_kl
            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(nets["actor"].parameters(), 0.5)
            nn.utils.clip_grad_norm_(nets["critic"].parameters(), 0.5)
            optimizer.step()
            with torch.no_grad():
                clipped = ((ratio - 1).abs() > s.clip).float().mean()
                approx_kl = (ratio - log_ratio - 1).mean()  #                      KL(pi_old || pi) ~ rho - log rho - 1
                entropy = -(log_probs.exp() * log_probs).sum(-1).mean()  #         H = -sum_a pi log pi
                rows.append(torch.stack([policy_loss, grad_norm, clipped, approx_kl, ref_kl, entropy]))
    names = ("policy_loss", "grad_norm", "clip_fraction", "approx_kl", "ref_kl", "entropy")
    return dict(zip(names, torch.stack(rows).mean(0).tolist(), strict=True))


def train(s: argparse.Namespace) -> tuple[nn.Module, list[dict[str, float]]]:
    """Return the trained actor, and the numbers of each iteration."""
    torch.manual_seed(s.seed)
    rng = np.random.default_rng(s.seed)
    envs = [gym.make("CartPole-v1") for _ in range(s.group_size)]
    nets = {"actor": network(4, 2, last_gain=0.01), "critic": network(4, 1, last_gain=1.0)}
    optimizer = torch.optim.Adam([p for net in nets.values() for p in net.parameters()], s.learning_rate, eps=1e-5)
    nets["reference"] = copy.deepcopy(nets["actor"])
    history, step = [], 0
    while step < s.total_steps:
        groups, taken = [], 0
        while taken < s.steps:  # whole episodes only: a batch is as many groups as fill it
            seeds = rng.integers(TEST_SEEDS, size=s.group_size).tolist()
            if s.algorithm == "grpo":
                seeds = seeds[:1] * s.group_size  # members share their start; PPO and REINFORCE need no groups
            groups.append(play(envs, seeds, nets["actor"]))
            taken += int(groups[-1].alive.sum())
        step += taken
        if s.reference_every and len(history) % s.reference_every == 0:
            nets["reference"].load_state_dict(nets["actor"].state_dict())
        scores = [g.reward.sum(1) for g in groups]
        equal = float(np.mean([bool((score == score[0]).all()) for score in scores]))
        row = {"step": step, "return_mean": torch.cat(scores).mean().item(), "zero_variance_groups": equal}
        history.append(row | update(groups, nets, optimizer, s))
        if len(history) % 5 == 0 or step >= s.total_steps:
            print(" | ".join(f"{name} {number:.6g}" for name, number in history[-1].items()), flush=True)
    return nets["actor"], history


def plot(history: list[dict[str, float]], path: str) -> None:
    """Draw each logged number against the environment steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 10), layout="constrained")
    for name, axes in zip(list(history[0])[1:], figure.subplots(len(history[0]) - 1, sharex=True), strict=True):
        axes.plot([row["step"] for row in history], [row[name] for row in history])
        axes.set_title(name, loc="left", fontsize=9)
    figure.savefig(path)


def settings(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the settings: the defaults of the algorithm, overridden by the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=DEFAULTS, default="grpo")
    parser.add_argument("--variant", choices=VARIANTS, default="per_step", help="GRPO's rule of credit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-steps", type=int, default=100_000, help="environment steps in the whole run, at least")
    parser.add_argument("--steps", type=int, default=1000, help="environment steps in an iteration, at least")
    parser.add_argument("--group-size", type=int, default=4, help="episodes from each start, 2 or more")
    parser.add_argument("--gamma", type=float, default=0.99, help="discount; 1 for GRPO unless given")
    parser.add_argument("--epochs", type=int, default=10, help="passes over each batch; 1 for REINFORCE unless given")
    parser.add_argument("--minibatch", type=int, default=128, help="steps in one gradient step; REINFORCE takes all")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of Adam; 0.01 for REINFORCE unless given")
    parser.add_argument("--clip", type=float, default=0.2, help="the ratio is clipped at 1 - clip and 1 + clip")
    parser.add_argument("--kl-coef", type=float, default=0.0, help="weight of the KL to the reference policy")
    parser.add_argument("--reference-every", type=int, default=0, help="iterations between its updates; 0: never")
    parser.add_argument("--plot", metavar="PNG", help="draw the logged numbers (needs matplotlib)")
    parser.add_argument("--render", action="store_true", help="show one greedy episode in a window (needs pygame)")
    parser.set_defaults(**DEFAULTS[parser.parse_known_args(arguments)[0].algorithm])
    s = parser.parse_args(arguments)
    if min(s.group_size - 1, s.epochs, s.minibatch, s.steps, s.total_steps) < 1:
        parser.error("--group-size must be at least 2; --epochs, --minibatch, --steps and --total-steps at least 1")
    return s


def main() -> None:
    s, started = settings(), time.perf_counter()
    torch.set_num_threads(1)  # more threads are slower on small networks
    actor, history = train(s)
    print(f"trained in {time.perf_counter() - started:.1f} s")
    seeds = np.random.default_rng(s.seed).integers(TEST_SEEDS, 2 * TEST_SEEDS, size=100).tolist()
    scores = play([gym.make("CartPole-v1") for _ in seeds], seeds, actor, greedy=True).reward.sum(1)
    print(f"greedy mean {scores.mean():.1f}, least {scores.min():.0f}, over {len(scores)} fresh episodes")
    if s.plot:
        plot(history, s.plot)
    if s.render:
        play([gym.make("CartPole-v1", render_mode="human")], [TEST_SEEDS], actor, greedy=True)


if __name__ == "__main__":
    main()
