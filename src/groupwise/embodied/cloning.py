"""Demonstrations for behaviour cloning: a collector hands out demonstrated steps in place of experience."""

from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from groupwise.algorithms.base import BaseAlgorithm
from groupwise.collectors.vector import EnvCollector
from groupwise.config.algorithm import BCCfg
from groupwise.config.run import RunCfg
from groupwise.data.rollout import TensorDict, find_nonfinite, transition_view
from groupwise.data.spaces import check_fits
from groupwise.embodied.lerobot import read_demos
from groupwise.engines import Engine
from groupwise.envs.base import VectorEnv
from groupwise.errors import ConfigError, DataError
from groupwise.policies.base import Policy
from groupwise.seeding import derive_seed
from groupwise.training.evaluation import EvaluationResult
from groupwise.training.trainer import Callback, Trainer

_SCORED_AT_ONCE = 256
"""Number of held-out steps in one forward pass."""


class DemoCollector(EnvCollector):
    """Hands out demonstrated steps: the next ones of an endless sequence of random orders of all of them.

    Nothing is read before it is needed: a run's policy can be loaded and evaluated without its data.

    Args:
        env: gives the spaces; it takes no steps.
        action_repeat, action_chunk: of the environment.

    Raises:
        ConfigError: no data is named.
    """

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy,
        cfg: BCCfg,
        engine: Engine,
        *,
        seed: int,
        action_repeat: int = 1,
        action_chunk: int = 1,
    ) -> None:
        super().__init__(env, policy, seed=seed, rank=engine.rank)
        if cfg.data is None:
            option = f" --env.action-repeat {action_repeat}" if action_repeat > 1 else ""
            raise ConfigError(
                f"bc needs demonstrations, got algorithm.data=None; fix: groupwise demos {env.env_id}{option}"
            )
        self.folder, self.cfg, self.engine = cfg.data, cfg, engine
        self.action_repeat, self.action_chunk = action_repeat, action_chunk

    @cached_property
    def labels(self) -> TensorDict:
        """All M demonstrated steps by the keys of a rollout, and ``demonstrated`` [M, C]: which actions of a chunk are.

        With chunks ``action`` is the next C actions, the last one repeated after the end.

        Raises:
            DataError: the data is missing, of other observations, actions or ``action_repeat``, or not finite.
        """
        demos, space = read_demos(self.folder, self.env.observation_space), self.env.action_space
        if demos.action_repeat not in (None, self.action_repeat):
            raise DataError(
                f"{self.folder} was recorded with env.action_repeat={demos.action_repeat!r:.40}, but this run has "
                f"{self.action_repeat}; fix: the same in both"
            )
        steps, episode = len(demos.episode), torch.from_numpy(demos.episode)
        if demos.reward is None and getattr(self.policy, "reward_normalizer", None) is not None:
            raise DataError(
                f"{self.folder} has no rewards (next.reward), which policy.normalize_reward needs; fix: normalize_reward=False"
            )
        reward = torch.zeros(steps) if demos.reward is None else torch.from_numpy(demos.reward)
        numbers = {"obs": demos.obs, "action": torch.from_numpy(demos.action), "reward": reward}
        counts = torch.ones(steps, dtype=torch.bool)
        for bad in find_nonfinite(TensorDict(numbers, batch_size=[steps])[None], counts[None]):
            step = int(bad.slots[0].nonzero()[0])
            frame = step - int(torch.searchsorted(episode, episode[step]))
            where = f"{bad.name} of {self.folder}, episode {episode[step]}, frame {frame},"
            raise DataError(f"{where} is not finite; fix: record it again")
        found, single = demos.action.shape[1:], tuple(space.shape) or (1,)
        # data has a scalar as a vector of one number, which alone would not tell a chunk of scalars from another vector
        chunked = found == (single[1:] or (1,)) and (len(single) > 1 or self.action_chunk > 1)
        same_kind = (demos.action.dtype.kind == "f") == (space.dtype.kind == "f")
        if not same_kind or (not chunked and found != single):
            raise DataError(
                f"{self.folder} has actions {demos.action.dtype} of shape {list(found)}, but those of {self.env.env_id} "
                f"are in {space}; fix: the environment that they were recorded with"
            )
        check_fits(space, demos.action, f"an action of {self.folder}")
        now = torch.arange(steps)[:, None] + torch.arange(single[0] if chunked else 1)
        last = torch.searchsorted(episode, episode, right=True)[:, None] - 1
        action = numbers["action"][torch.minimum(now, last)]
        action = action.reshape(steps, *space.shape).to(self.policy.device)
        demonstrated = now <= last
        labels = numbers | {
            "action": self.policy.own_action(action).cpu(),
            "executed": demonstrated.sum(dim=1),
            "demonstrated": demonstrated,
            "episode_id": episode,
            "group_id": episode,
            "valid": counts,
            "loss_mask": counts,
        }
        return TensorDict(labels, batch_size=[steps])

    @cached_property
    def held_out(self) -> Bool[Tensor, " step"]:
        """Which steps are not trained on: whole episodes, at least one of several."""
        episode = self.labels["episode_id"]
        episodes = int(episode.max()) + 1
        count = 0 if self.cfg.holdout == 0 or episodes == 1 else max(1, round(self.cfg.holdout * episodes))
        chosen = torch.zeros(episodes, dtype=torch.bool)
        chosen[torch.randperm(episodes, generator=self._generator("holdout"))[: min(count, episodes - 1)]] = True
        return chosen[episode]

    def fit_normalizers(self) -> None:
        """Give the policy's normalisers the statistics of the steps that are trained on. They stay as they are afterwards."""
        steps, ends = self.labels.select("obs", "reward"), torch.ones_like(self.held_out)
        ends[:-1] = self.labels["episode_id"].diff() != 0
        steps.update({"valid": ~self.held_out, "terminated": torch.zeros_like(ends), "truncated": ends})
        # each process has all steps, so nothing is summed
        self.policy.update_normalizers(steps.unsqueeze(0).to(self.policy.device), Engine())

    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """The next ``num_envs * num_steps`` steps of the sequence; with several processes, each takes its share of it."""
        rows = self.env.num_envs
        count = rows * num_steps
        first = (self.iteration * self.engine.world_size + self.rank) * count
        trained = (~self.held_out).nonzero()[:, 0]
        size = len(trained)
        passes = range(first // size, (first + count - 1) // size + 1)  # each over all data, in an order of its own
        orders = [torch.randperm(size, generator=self._generator("pass", number)) for number in passes]
        index = trained[torch.cat(orders)[first % size :][:count]]
        steps = self.labelled(index, self.cfg.label_noise, "label", self.rank, self.iteration)
        batch = transition_view(rollout)
        batch.update_(steps.reshape(rows, num_steps).select(*batch.keys(), strict=False))
        self.last_steps = count
        self.iteration += 1
        return rollout

    def labelled(self, index: Tensor, noise: float, *path: int | str) -> TensorDict:
        """Some of the steps, with noise on their labels that follows from the path."""
        steps: TensorDict = self.labels.exclude("reward")[index]
        return steps.set("action", self.policy.label(steps["action"], noise, self._generator(*path)))

    def _generator(self, *path: int | str) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(self.seed, *path))


def demo_collector(
    cfg: RunCfg, env: VectorEnv, algorithm: BaseAlgorithm, engine: Engine, *, read: bool, fit_normalizers: bool
) -> tuple[DemoCollector, tuple[Callback, ...]]:
    """The collector of a run, and the callback that scores held-out demonstrations.

    Args:
        read: read the data at once, so that a mistake shows before training starts.
        fit_normalizers: then also give its statistics to the policy's normalisers.
    """
    assert isinstance(cfg.algorithm, BCCfg)
    policy = algorithm.policy
    if policy.state_size:
        raise ConfigError(f"bc clones steps, and {type(policy).__name__} has a memory; fix: policy='actor_critic'")
    decisions = {"action_repeat": cfg.env.action_repeat, "action_chunk": cfg.env.action_chunk}
    collector = DemoCollector(env, policy, cfg.algorithm, engine, seed=cfg.seed, **decisions)
    if read and fit_normalizers:
        collector.fit_normalizers()
    elif read:
        _ = collector.labels
    return collector, (DemoScores(algorithm, collector),)


class DemoScores(Callback):
    """Adds scores on held-out demonstrations to each evaluation."""

    def __init__(self, algorithm: BaseAlgorithm, collector: DemoCollector) -> None:
        self.algorithm = algorithm
        self.collector = collector

    def on_evaluation_end(self, trainer: Trainer, evaluation: EvaluationResult) -> None:
        """Add ``eval/demo_*`` to the metrics."""
        held_out = self.collector.held_out.nonzero()[:, 0]
        if len(held_out):
            trainer.metrics.update(self.scores(held_out))

    @torch.no_grad()
    def scores(self, steps: Int[Tensor, " step"]) -> dict[str, float]:
        """Loss, and where actions are discrete the share of right ones, else the absolute error, over these steps."""
        policy, losses, errors, masks = self.algorithm.policy, [], [], []
        for index in steps.split(_SCORED_AT_ONCE):  # type: ignore[no-untyped-call]
            batch = self.collector.labelled(index, 0.0, "held_out", int(index[0])).to(policy.device)
            inputs = self.algorithm.policy_inputs(batch.unsqueeze(0))
            losses.append(-self.algorithm.score(policy, inputs).log_prob[inputs["loss_mask"]])  # of each unit
            own = policy.act(batch["obs"], deterministic=True).action
            action, wanted = (policy.env_action(part).double() for part in (own, batch["action"]))
            masks.append(batch["demonstrated"])
            errors.append((action - wanted).abs().reshape(*masks[-1].shape, -1))
        error = torch.cat(errors)[torch.cat(masks)]
        found = {"eval/demo_loss": float(torch.cat(losses).mean())}
        if self.collector.labels["action"].is_floating_point():
            return found | {"eval/demo_error": float(error.mean())}
        accuracy = (error == 0).double().mean(dim=0)
        found["eval/demo_accuracy"] = float(accuracy.mean())
        if len(accuracy) > 1:
            found |= {f"eval/demo_accuracy_{i}": float(share) for i, share in enumerate(accuracy)}
        return found
