"""Fixed windows of experience from simulators in torch, without waiting for the device: what PPO learns from on a GPU."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.collectors.resident import ResidentCollector, Running, told
from groupwise.collectors.writer import RolloutWriter
from groupwise.data.rollout import Nested, count_unfinite
from groupwise.engines.replay import Recorder
from groupwise.envs.base import EnvStep
from groupwise.envs.native import Rows, TorchGroupEnv
from groupwise.lean_tensordict import TensorDict
from groupwise.policies.base import Policy
from groupwise.seeding import derive_seed


class TorchVectorCollector(ResidentCollector):
    """The rollouts of ``VectorCollector`` from a ``TorchGroupEnv``: the same streams, so the same actions and episodes."""

    def __init__(
        self,
        env: TorchGroupEnv,
        policy: Policy,
        *,
        seed: int = 0,
        rank: int = 0,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(env, policy, seed=seed, rank=rank, recorder=recorder)
        self._running = Running(env.num_envs, env.device)
        self._age = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)

    def _prepare(self, num_steps: int) -> None:
        if self._goes_on:
            return
        rows = self.env.seeded(self.env.rows, derive_seed(self.seed, "env", self.rank, self.iteration))
        self._put(self.env.renewed(rows, torch.ones_like(rows.held)))
        self._running.forget()
        self._age.zero_()

    @torch.inference_mode()
    def _filled(self) -> Float[Tensor, " number"]:
        assert self._rollout is not None
        assert self._rows is not None
        env, rollout, rows, critic = self.env, self._rollout, self._rows, not self.policy.actor_only
        num_steps = rollout.shape[1] - 1
        writer = RolloutWriter(rollout, value=critic, resident=True)
        finals = FinalObs(env, num_steps) if critic else None
        turn, obs = self._turning(), env.observed(rows)
        for t in range(num_steps):
            writer.observe(t, obs)
            action, rows, obs, step, _ = turn(rows, obs)
            writer.act(t, action)
            writer.outcome(t, step, step.truncated)
            if finals is not None:
                finals.remember(t, step.truncated & ~step.terminated, step.obs)
        writer.observe(num_steps, obs)
        if finals is not None:
            finals.fill(rollout, self.policy, obs)
        self._rows.copy_(rows)
        return self._label(rollout)

    def _next(self, rows: Rows, action: Tensor, *others: Tensor) -> tuple[Rows, Nested, EnvStep, tuple[Tensor, ...]]:
        rows, step = self.env.stepped(rows, action)
        rows = self.env.renewed(rows, step.terminated | step.truncated)
        return rows, self.env.observed(rows), step, ()

    def _more(self, numbers: list[float]) -> dict[str, float]:
        return {"rollout/idle_fraction": 0.0}

    def _label(self, rollout: TensorDict) -> Float[Tensor, " number"]:
        """Fill masks, ids and steps; what is told of the rollout."""
        reward, terminated = rollout["reward"][:, :-1], rollout["terminated"][:, :-1]
        done = terminated | rollout["truncated"][:, :-1]
        episode_id, step = labelled(done, self._age)
        for key in ("valid", "loss_mask"):
            rollout[key][:, :-1].fill_(True)
        for key, labels in (("step", step), ("group_id", episode_id), ("episode_id", episode_id)):
            rollout[key][:, :-1].copy_(labels)
        slot = torch.arange(done.shape[1], device=done.device)
        ends = self._running.follow(reward, terminated, done, (slot - step).clamp(min=0), ~done[:, -1])
        self._age.copy_((step[:, -1] + 1).masked_fill(done[:, -1], 0))
        steps = torch.full((), done.numel(), device=done.device)
        return told(ends, count_unfinite(rollout), steps)


def labelled(
    done: Bool[Tensor, "row step"], age: Int[Tensor, " row"]
) -> tuple[Int[Tensor, "row step"], Int[Tensor, "row step"]]:
    """``label_episodes`` of environments that never take a step to reset, on the device."""
    begins = torch.ones_like(done)
    begins[:, 1:] = done[:, :-1]
    count = begins.cumsum(dim=1)
    before = count[:, -1:].cumsum(dim=0) - count[:, -1:]
    slot = torch.arange(done.shape[1], device=done.device)
    began = torch.where(begins, slot, 0).cummax(dim=1).values
    return before + count - 1, slot - began + torch.where(count == 1, age[:, None], 0)


class FinalObs:
    """The observations at which episodes were cut, for their values: as many a row as a window can hold.

    Between two cuts of a row lie at least as many steps as the environment's limit.
    """

    def __init__(self, env: TorchGroupEnv, num_steps: int) -> None:
        limit = env.max_episode_steps
        most = 0 if limit is None else 1 + (num_steps - 1) // limit
        zeros = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
        self._count = zeros
        self._step = [zeros + num_steps for _ in range(most)]
        self._obs: list[Nested | None] = [None] * most

    def remember(self, step: int, cut: Bool[Tensor, " row"], obs: Nested) -> None:
        """Keep the final observations [N, ...] of the rows that were cut at ``step``."""
        for number, kept in enumerate(self._obs):
            here = cut & (self._count == number)
            self._obs[number] = obs.clone() if kept is None else _chosen(here, obs, kept)
            self._step[number] = torch.where(here, step, self._step[number])
        self._count = self._count + cut

    def fill(self, rollout: TensorDict, policy: Policy, last_obs: Nested) -> None:
        """Complete ``value`` and ``next_value``; ``last_obs`` are the observations of the last slot."""
        value, next_value = rollout["value"], rollout["next_value"]
        known = [obs for obs in self._obs if obs is not None]
        values = policy.value(torch.cat([last_obs, *known])).view(-1, rollout.shape[0])
        value[:, -1].copy_(values[0])
        next_value[:, :-1].copy_(value[:, 1:])
        next_value.masked_fill_(rollout["terminated"], 0.0)
        for step, final in zip(self._step, values[1:], strict=True):
            next_value.scatter_(1, step[:, None], final[:, None])  # rows that were not cut write into the padding
        next_value[:, -1].zero_()


def _chosen(mask: Bool[Tensor, " row"], yes: Nested, no: Nested) -> Nested:
    """The rows of ``yes`` where ``mask``, else those of ``no``."""
    if isinstance(yes, Tensor):
        assert isinstance(no, Tensor)
        return torch.where(mask.reshape(-1, *[1] * (yes.dim() - 1)), yes, no)
    leaves = {key: _chosen(mask, leaf, no[key]) for key, leaf in yes.items()}
    return TensorDict(leaves, batch_size=[len(mask)], device=mask.device)
