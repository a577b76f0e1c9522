"""Groups of attempts in step with each other from simulators in torch, without waiting for the device: GRPO on a GPU."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.collectors.resident import ResidentCollector, Running, told
from groupwise.collectors.writer import RolloutWriter
from groupwise.config.algorithm import CollectionCfg
from groupwise.data.rollout import Nested, count_unfinite
from groupwise.engines.replay import Recorder
from groupwise.envs.base import EnvStep, GroupStartReport
from groupwise.envs.groups import verify_group_start
from groupwise.envs.native import Rows, TorchGroupEnv
from groupwise.errors import EnvError
from groupwise.functional.row_random import hash_pair
from groupwise.lean_tensordict import TensorDict
from groupwise.policies.base import Policy
from groupwise.seeding import derive_seed


class TorchGroupCollector(ResidentCollector):
    """Windows of groups: the rows of a group are neighbours, which start, and start again, together.

    Members that ended wait for their siblings. The window's last step cuts those that are under way; where the first
    member was among them, the next window's group begins in the state that it had reached, copied for all siblings, else
    at a new start. That member is chosen without looking at how it did, so groups begin in states that the policy reaches
    by itself, and the attempts of the first members, from start to end across windows, are what ``rollout/return_mean``
    is about.

    Ids in the rollout are below N * T and not dense: a group's is the number of its first row's slot among those of all
    groups' first rows, an episode's the number of its first slot.

    Args:
        attempt_steps: attempts are cut (truncated) after so many steps; the next group begins at a new start.
        verify_start: try out, before anything is learned, that siblings share their start bit for bit; False where
            that was done already.

    Raises:
        EnvError: rows do not make whole groups, the policy has a critic, or ``collection`` asks for what only
            ``GroupCollector`` does.
        GroupStartError: siblings do not share a start.
    """

    def __init__(
        self,
        env: TorchGroupEnv,
        policy: Policy,
        *,
        group_size: int,
        attempt_steps: int | None = None,
        collection: CollectionCfg | None = None,
        seed: int = 0,
        rank: int = 0,
        verify_start: bool = True,
        recorder: Recorder | Literal[False] | None = None,
    ) -> None:
        super().__init__(env, policy, seed=seed, rank=rank, recorder=recorder)
        self.group_size = group_size
        self.attempt_steps = attempt_steps
        self.collection = collection or CollectionCfg(partial_groups="truncate")
        self._check()
        if verify_start and env.start_report is None:
            env.start_report = verify_group_start(env, seed=derive_seed(seed, "verify", rank))
        self.start_report: GroupStartReport | None = env.start_report
        """What the check of the shared start found."""
        rows = torch.arange(env.num_envs, device=env.device)
        self._group, self._member = rows // group_size, rows % group_size
        self._branches = torch.zeros(env.num_envs // group_size, dtype=torch.bool, device=env.device)
        """Groups that begin where their first member was cut."""
        self._start_stream, self._noise_stream = (torch.zeros_like(rows[0]) for _ in range(2))
        self._running = Running(len(self._branches), env.device)

    def _check(self) -> None:
        env, cfg = self.env, self.collection
        if cfg.partial_groups != "truncate":
            raise EnvError(
                f"collection.partial_groups={cfg.partial_groups!r} is what GroupCollector does; fix: that, or 'truncate'"
            )
        if env.num_envs % self.group_size:
            raise EnvError(
                f"{env.num_envs} rows of {env.env_id} do not make whole groups of {self.group_size}, which "
                "collection.partial_groups='truncate' needs; fix: a multiple, or 'complete'"
            )
        if not self.policy.actor_only:
            raise EnvError(
                "collection.partial_groups='truncate' keeps no values, and the policy has a critic; fix: an actor_only policy, "
                "or 'complete'"
            )
        if cfg.filter_groups:
            raise EnvError(
                "collection.partial_groups='truncate' keeps all groups, and collection.filter_groups was set; fix: leave it "
                "out, or partial_groups='complete'"
            )

    def _prepare(self, num_steps: int) -> None:
        self._start_stream.fill_(derive_seed(self.seed, "start", self.rank, self.iteration))
        self._noise_stream.fill_(derive_seed(self.seed, "noise", self.rank, self.iteration))
        if not self._goes_on:
            self._branches.zero_()
            self._running.forget()
        if self._rows is None:
            everyone = torch.ones_like(self.env.rows.held)
            seeds = torch.zeros_like(self.env.rows.elapsed)
            self._put(self.env.started(self.env.rows, everyone, seeds, seeds))

    @torch.inference_mode()
    def _filled(self) -> Float[Tensor, " number"]:
        assert self._rollout is not None
        assert self._rows is not None
        env, rollout = self.env, self._rollout
        num_steps = rollout.shape[1] - 1
        writer = RolloutWriter(rollout, value=False, resident=True)
        running = rollout["valid"].unbind(1)
        turn, slots = self._turning(), torch.arange(1, num_steps + 1, device=env.device)
        seeds = self._seeds(num_steps)
        rows = self._opened(self._rows, *seeds[0])
        began = torch.zeros_like(self._group)
        obs, starts = env.observed(rows), [began]
        for t, (slot, more) in enumerate(zip(slots.unbind(), (slots < num_steps).unbind(), strict=True)):
            writer.observe(t, obs)
            running[t].copy_(~rows.held)
            action, rows, obs, step, (began,) = turn(rows, obs, began, slot, more, *seeds[t + 1])
            writer.act(t, action)
            writer.outcome(t, step, step.truncated)
            starts.append(began)
        cut = ~rows.held
        rollout["truncated"][:, num_steps - 1].logical_or_(cut)
        writer.observe(num_steps, obs)
        self._rows.copy_(rows)
        return self._label(rollout, torch.stack(starts[:-1]).T, cut)

    def _next(self, rows: Rows, action: Tensor, *others: Tensor) -> tuple[Rows, Nested, EnvStep, tuple[Tensor, ...]]:
        """``others``: the slot at which each row's attempt began, the number of the next slot, whether the window has it, and
        seeds of starts and of noise there.
        """
        began, slot, more, start_seed, noise_seed = others
        rows, step = self._stepped(rows, action, slot - began)
        over = self._whole(rows.held) & more
        rows = self.env.started(rows, over, start_seed, noise_seed)
        return rows, self.env.observed(rows), step, (torch.where(over, slot, began),)

    def _stepped(self, rows: Rows, action: Tensor, age: Int[Tensor, " row"]) -> tuple[Rows, EnvStep]:
        """The rows after a step, with attempts that reach ``attempt_steps`` at this age held and cut."""
        rows, step = self.env.stepped(rows, action)
        if self.attempt_steps is None:
            return rows, step
        cut = ~rows.held & (age >= self.attempt_steps)
        return rows._replace(held=rows.held | cut), step._replace(truncated=step.truncated | cut)

    def _opened(self, rows: Rows, start_seed: Int[Tensor, " row"], noise_seed: Int[Tensor, " row"]) -> Rows:
        """The rows at the window's beginning: each group at a new start, or where its first member was cut."""
        branches = self._branches[self._group]
        rows = self.env.copied(rows, branches, self._group * self.group_size, noise_seed)
        return self.env.started(rows, ~branches, start_seed, noise_seed)

    def _seeds(self, num_steps: int) -> list[tuple[Int[Tensor, " row"], Int[Tensor, " row"]]]:
        """Of starts and of noise, of groups that begin at each step of the window; behind it, where none does, some."""
        step = torch.arange(num_steps, device=self._group.device)[:, None]
        group = torch.arange(len(self._branches), device=self._group.device) * num_steps + step
        start = hash_pair(self._start_stream, group)[:, self._group]
        noise = self._group * num_steps + step
        if self.collection.noise == "independent":
            noise = noise * self.group_size + self._member
        found = list(zip(start.unbind(), hash_pair(self._noise_stream, noise).unbind(), strict=True))
        return [*found, found[-1]]

    def _whole(self, mask: Bool[Tensor, " row"]) -> Bool[Tensor, " row"]:
        """Rows whose whole group is in the mask."""
        return mask.view(-1, self.group_size).all(dim=1)[self._group]

    def _label(
        self, rollout: TensorDict, began: Int[Tensor, "row step"], goes_on: Bool[Tensor, " row"]
    ) -> Float[Tensor, " number"]:
        """Fill masks, ids and steps; what is told of the rollout."""
        num_steps = began.shape[1]
        valid = rollout["valid"][:, :-1]
        slot = torch.arange(num_steps, device=began.device)
        rollout["loss_mask"][:, :-1].copy_(valid)
        rollout["step"][:, :-1].copy_(torch.where(valid, slot - began, 0))
        row = torch.arange(len(began), device=began.device)
        for key, number in (("group_id", self._group), ("episode_id", row)):
            rollout[key][:, :-1].copy_(torch.where(valid, number[:, None] * num_steps + began, -1))

        first = slice(0, None, self.group_size)
        self._branches.copy_(goes_on[first])
        terminated, truncated = rollout["terminated"][first, :-1], rollout["truncated"][first, :-1]
        ended = terminated | truncated
        ended = torch.cat([ended[:, :-1], ended[:, -1:] & ~goes_on[first, None]], dim=1)
        ends = self._running.follow(rollout["reward"][first, :-1], terminated, ended, began[first], goes_on[first])
        groups = len(self._branches) + (began[first, 1:] != began[first, :-1]).sum()
        return told(ends, count_unfinite(rollout), valid.sum(), groups, valid.double().mean())

    def _more(self, numbers: list[float]) -> dict[str, float]:
        groups, busy = numbers
        return {"rollout/groups": groups, "rollout/idle_fraction": 1 - busy, "rollout/wasted_steps": 0.0}
