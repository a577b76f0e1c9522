"""Collection from torch environments: windows for PPO, and groups for GRPO."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from groupwise.collectors.vector import EnvCollector, Episode, MakeActor, RolloutWriter, VectorCollector
from groupwise.config.algorithm import CollectionCfg
from groupwise.data.rollout import Nested, TensorDict
from groupwise.envs.base import EnvStep
from groupwise.envs.starts import verify_group_start
from groupwise.envs.torch_env import Resets, TorchGroupEnv, TorchRows
from groupwise.errors import EnvError
from groupwise.functional.random import hash_pair, step_key
from groupwise.policies.base import Action, Policy
from groupwise.seeding import derive_seed


class StepOutput(NamedTuple):
    """An action of all rows and its outcome."""

    action: Action
    rows: TorchRows
    obs: Nested
    """[N, ...] of the rows, for the next action."""
    result: EnvStep
    """Outcome, with the observations at which episodes ended, where they did."""
    others: tuple[Tensor, ...] = ()
    """Further tensors that the collector carries to the next step."""


Step: TypeAlias = Callable[..., StepOutput]
Window: TypeAlias = Callable[..., Any]
"""Fills a rollout: from its writer, the number of steps, and tensors, to tensors."""


class TorchCollector(EnvCollector):
    """Acts and steps all rows of a ``TorchGroupEnv`` by one function.

    Args:
        graph: makes a faster ``window``. None: the method.

    Raises:
        EnvError: the policy is on another device than the environment, or recurrent.
    """

    env: TorchGroupEnv
    step: Callable[..., StepOutput]
    window: Window
    """All steps of a rollout: a function of tensors, which writes into the rollout and draws from ``generator``."""

    def __init__(
        self,
        env: TorchGroupEnv,
        policy: Policy,
        *,
        seed: int = 0,
        rank: int = 0,
        actor: MakeActor | None = None,
        graph: "Callable[[TorchCollector], Window] | None" = None,
    ) -> None:
        if policy.state_size:
            raise EnvError(
                f"a recurrent policy cannot act within the steps of {env.env_id}; fix: VectorCollector for PPO, or "
                "collection.partial_groups='complete' for GRPO"
            )
        if policy.device.type != env.device.type:
            raise EnvError(
                f"{env.env_id} is on {env.device}, and the policy on {policy.device}; fix: device={str(policy.device)!r}"
            )
        super().__init__(env, policy, seed=seed, rank=rank, actor=actor)
        self._graph = None if graph is None else graph(self)
        self._age: Any = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
        self._return: Any = torch.zeros(env.num_envs, dtype=torch.float64, device=env.device)

    @property
    def play(self) -> Window:
        """Fills a rollout: ``window``, or the graph that takes its place."""
        return self.window if self._graph is None else self._graph

    @property
    def is_heard(self) -> bool:
        """Whether hooks are called after every step."""
        return bool(self._hooks)

    def stepper(self) -> Step:
        """A function that acts and steps all rows, and calls the hooks."""
        step = partial(self.step, partial(self.actor(), generator=self.generator))
        if not self._hooks:
            return step

        def heard(*inputs: Any) -> StepOutput:
            output = step(*inputs)
            for hook in self._hooks:
                hook(output.action.action, output.result)
            return output

        return heard

    def count(
        self,
        rollout: TensorDict,
        writer: RolloutWriter,
        rows: slice,
        began: Int[Tensor, "row step"],
        goes_on: Bool[Tensor, " row"],
        facts: Sequence[Tensor] = (),
    ) -> list[float]:
        """Record the finished episodes of these rows, in the order of their ends; returns the facts as numbers. One host sync.

        Args:
            began: slot of the rollout at which each slot's episode began; 0 if before.
            goes_on: rows whose last episode continues in the next rollout.
        """
        began, goes_on, index = began[rows], goes_on[rows], range(len(rollout))[rows]
        reward, terminated, truncated = (rollout[key][rows, :-1] for key in ("reward", "terminated", "truncated"))
        ended = terminated | truncated
        ended[:, -1] &= ~goes_on
        earlier = began == 0  # they may have begun in an earlier rollout

        def since_began(each: Tensor) -> Tensor:
            total = each.cumsum(dim=1)
            return total - (total - each).gather(1, began)

        finite = reward.isfinite()  # a number that is not spoils its own episode only
        returns = since_began(torch.where(finite, reward, 0).double()) + torch.where(
            earlier, self._return[:, None], 0.0
        )
        returns = torch.where(since_began((~finite).long()) > 0, torch.nan, returns)
        length = torch.arange(1, 1 + began.shape[1], device=began.device) - began
        length += torch.where(earlier, self._age[:, None], 0)
        self._return = torch.where(goes_on, returns[:, -1], 0.0)
        self._age = torch.where(goes_on, length[:, -1], 0)
        parts = torch.stack([part.T.double() for part in (ended, returns, length, terminated)])
        read = torch.cat([*(fact.double().view(1) for fact in facts), parts.flatten()]).cpu()
        over, *numbers = read[len(facts) :].view_as(parts)
        steps, places = over.nonzero().T.tolist()
        found = zip(*(part[over.bool()].tolist() for part in numbers), strict=True)
        outcomes: Any = (
            writer.outcomes([index[place] for place in places], steps) if writer.reports else [()] * len(steps)
        )
        episodes = zip(found, outcomes, strict=True)
        self.record(Episode(score, int(length), bool(end), *outcome) for (score, length, end), outcome in episodes)
        return read[: len(facts)].tolist()


class TorchVectorCollector(TorchCollector, VectorCollector):
    """The rollouts of ``VectorCollector`` from a ``TorchGroupEnv``, without a host sync in any step."""

    def step(self, act: Callable[[Nested], Action], rows: TorchRows, obs: Nested, resets: Resets) -> StepOutput:
        """An action of all rows, a step, and new starts where episodes ended. A pure function of tensors."""
        action = act(obs)
        rows, result = self.env.stepped(rows, self.policy.env_action(action.action))
        rows = self.env.renewed(rows, result.terminated | result.truncated, resets)
        return StepOutput(action, rows, self.env.observed(rows), result)

    def window(
        self, writer: RolloutWriter, num_steps: int, rows: TorchRows, obs: Nested
    ) -> tuple[TorchRows, Nested, tuple[Tensor, Tensor, Nested] | None]:
        """The rows and their observations after ``num_steps`` steps; with a critic, the truncated episodes."""
        step, ends, resets = self.stepper(), [], self.env.resets(rows, num_steps)
        for t in range(num_steps):
            writer.observe(t, obs)
            action, rows, obs, result, _ = step(rows, obs, resets)
            writer.act(t, action)
            writer.outcome(t, result)
            ends.append(result.obs)
        return rows, obs, None if self.policy.actor_only else self._cut(writer.rollout, torch.stack(ends))

    def _cut(self, rollout: TensorDict, obs: Nested) -> tuple[Tensor, Tensor, Nested] | None:
        """Rows, steps and final observations, from ``obs`` [T, N, ...], of truncated episodes.

        Each row has as many as the limit of steps allows, so that no shape depends on the data; those that it has not are at
        the padded slot.
        """
        num_steps, limit = len(obs), self.env.max_episode_steps
        if limit is None:
            return None
        cut = (rollout["truncated"] & ~rollout["terminated"])[:, :num_steps]
        slots = torch.where(cut, torch.arange(num_steps, device=cut.device), num_steps).sort(dim=1).values
        steps = slots[:, : (num_steps - 1) // limit + 1]
        rows = torch.arange(len(steps), device=steps.device)[:, None].expand_as(steps)
        return rows.flatten(), steps.flatten(), obs[steps.flatten().clamp(max=num_steps - 1), rows.flatten()]

    @torch.inference_mode()
    def _fill(self, num_steps: int, writer: RolloutWriter, obs: Nested) -> Nested:
        self.action_generator()
        self.env.rows, obs, cut = self.play(writer, num_steps, self.env.rows, obs)
        if cut is not None:
            writer.cut_at(*cut)
        return obs

    @torch.inference_mode()
    def _label(self, rollout: TensorDict, writer: RolloutWriter) -> None:
        if not self.policy.actor_only:
            rollout["next_value"][:, -1] = 0.0
        done = rollout["terminated"][:, :-1] | rollout["truncated"][:, :-1]
        begins = torch.ones_like(done)
        begins[:, 1:] = done[:, :-1]
        slot = torch.arange(done.shape[1], device=done.device)
        began = torch.where(begins, slot, 0).cummax(dim=1).values
        episode = begins.flatten().cumsum(dim=0).view_as(begins) - 1
        step = slot - began + torch.where(began == 0, self._age[:, None], 0)
        labels = {"valid": True, "loss_mask": True, "step": step, "group_id": episode, "episode_id": episode}
        for key, label in labels.items():
            rollout[key][:, :-1] = label
        self.count(rollout, writer, slice(None), began, ~done[:, -1])
        self._metrics = {"rollout/idle_fraction": 0.0}

    def _begin(self) -> Nested:
        obs = super()._begin()
        self._age, self._return = (torch.from_numpy(of_row).to(self.env.device) for of_row in (self._age, self._return))
        return obs

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved ``state_dict``, with its running episodes if this rank saved them."""
        super().load_state_dict(state)
        self._age, self._return = self._age.to(self.env.device), self._return.to(self.env.device)


# Groups of episodes from torch environments, all rows in step: GRPO on a GPU


class TorchGroupCollector(TorchCollector):
    """Windows of groups, without a host sync in any step. The rows of a group are neighbours and start together.

    Members that ended wait for the others. The last step of the window truncates the running ones. If the first member
    was running, the next group begins in its state, copied for all members; otherwise at a new start. The first member
    is chosen without regard to returns, so groups begin in states that the policy itself reaches. Its episodes continue
    across windows and are those of ``rollout/return_mean``. Before the first, members are checked to share their start bit for bit.

    Raises:
        EnvError: rows do not make whole groups, the policy has a critic or is on another device, or a setting of
            ``collection`` needs ``GroupCollector``.
        GroupStartError: members do not share a start.
    """

    def __init__(
        self,
        env: TorchGroupEnv,
        policy: Policy,
        *,
        group_size: int,
        collection: CollectionCfg | None = None,
        seed: int = 0,
        rank: int = 0,
        actor: MakeActor | None = None,
        graph: Callable[[TorchCollector], Window] | None = None,
    ) -> None:
        super().__init__(env, policy, seed=seed, rank=rank, actor=actor, graph=graph)
        self.group_size = group_size
        self.collection = collection or CollectionCfg(partial_groups="truncate")
        self.horizon = self.collection.horizon
        cfg = self.collection
        if cfg.partial_groups != "truncate":
            raise EnvError(f"collection.partial_groups={cfg.partial_groups!r} needs GroupCollector; fix: 'truncate'")
        if env.num_envs % self.group_size:
            raise EnvError(
                f"{env.num_envs} rows of {env.env_id} do not make whole groups of {self.group_size}, which "
                "collection.partial_groups='truncate' needs; fix: a multiple, or 'complete'"
            )
        if not self.policy.actor_only:
            raise EnvError(
                "collection.partial_groups='truncate' keeps no values, and the policy has a critic; fix: an actor_only "
                "policy, or 'complete'"
            )
        if cfg.dynamic_sampling is not None:
            raise EnvError(
                "collection.partial_groups='truncate' keeps all groups, and collection.dynamic_sampling leaves some out; fix: "
                "None, or partial_groups='complete'"
            )
        if env.start_report is None:
            env.start_report = verify_group_start(env, seed=derive_seed(seed, "verify", rank))
        num_groups, device = env.num_envs // group_size, env.device
        rows = torch.arange(env.num_envs, device=device)
        self._group, self._member = rows // group_size, rows % group_size
        self._goes_on = torch.zeros(num_groups, dtype=torch.bool, device=device)
        """Groups whose first member was truncated by the window, and which begin in its state."""
        self._return, self._age = self._return[:num_groups], self._age[:num_groups]  # of first members

    @torch.inference_mode()
    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """Exactly ``num_steps`` slots of every row.

        Raises:
            EnvError: the horizon is never reached.
        """
        if self.horizon is not None and self.horizon > num_steps and self.env.max_episode_steps is None:
            raise EnvError(
                f"collection.horizon={self.horizon} is never reached: with partial_groups='truncate' a group ends with the "
                f"rollout, after num_steps={num_steps}, and the next begins where it was; fix: leave it out, or a horizon "
                f"of at most {num_steps}"
            )
        env, seeds = self.env, self._seeds(num_steps)
        self.action_generator()
        if not env.rows.state:
            everywhere = torch.ones_like(env.rows.paused)
            env.rows = env.started(env.rows, everywhere, *(column[0] for column in seeds))
        writer = RolloutWriter(rollout, self.policy)
        env.rows, obs, valid, began = self.play(writer, num_steps, env.rows, self._goes_on[self._group], *seeds)
        rollout, rows = writer.finish(num_steps, obs), env.rows
        rollout["truncated"][:, num_steps - 1].logical_or_(~rows.paused)
        self.iteration += 1

        # masks, ids and steps
        running = ~rows.paused
        slot = torch.arange(num_steps, device=valid.device)
        begins = (began == slot)[:: self.group_size]
        number = begins.flatten().cumsum(dim=0).view_as(begins) - 1
        group_id = number[self._group].gather(1, began)
        labels = {
            "valid": valid,
            "loss_mask": valid,
            "step": torch.where(valid, slot - began, 0),
            "group_id": torch.where(valid, group_id, -1),
            "episode_id": torch.where(valid, group_id * self.group_size + self._member[:, None], -1),
        }
        for key, label in labels.items():
            rollout[key][:, :-1] = label

        # the episodes of first members; returns and lengths of running ones are kept
        first = slice(0, None, self.group_size)
        self._goes_on = running[first]
        facts = [valid.sum(), rollout["group_id"].max()]
        steps, last_group = self.count(rollout, writer, first, began, running, facts)
        self.last_steps = int(steps)
        self._metrics = {
            "rollout/groups": last_group + 1,
            "rollout/idle_fraction": 1 - steps / valid.numel(),
            "rollout/wasted_steps": 0.0,
        }
        return rollout

    def window(
        self,
        writer: RolloutWriter,
        num_steps: int,
        rows: TorchRows,
        goes_on: Bool[Tensor, " row"],
        start_seeds: Int[Tensor, "slot row"],
        noise_seeds: Int[Tensor, "slot row"],
    ) -> tuple[TorchRows, Nested, Bool[Tensor, "row step"], Int[Tensor, "row step"]]:
        """The rows and their observations after ``num_steps`` steps; which rows ran in each, and the slots at which their episodes began."""
        env, step = self.env, self.stepper()
        slots = torch.arange(1, num_steps + 1, device=env.device)
        keys = step_key(start_seeds, torch.zeros_like(start_seeds))  # in as many kernels as those of one step
        seeds = list(zip(start_seeds, noise_seeds, keys, strict=True))
        rows = env.copied(rows, goes_on, self._group * self.group_size, noise_seeds[0])
        rows = env.started(rows, ~goes_on, *seeds[0])
        obs, began = env.observed(rows), torch.zeros_like(self._group)
        valids, starts = [], []
        for t, (slot, may_start) in enumerate(zip(slots, slots < num_steps, strict=True)):
            writer.observe(t, obs)
            valids.append(~rows.paused)
            starts.append(began)
            action, rows, obs, result, (began,) = step(rows, obs, began, slot, may_start, *seeds[t + 1])
            writer.act(t, action)
            writer.outcome(t, result)
        return rows, obs, torch.stack(valids, dim=1), torch.stack(starts, dim=1)

    def state_dict(self) -> dict[str, Any]:
        """The state, with the running episodes."""
        running = {"goes_on": self._goes_on, "return": self._return, "length": self._age}
        return super().state_dict() | {"running": running | {"rank": self.rank, "env": self.env.state_dict()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved ``state_dict``, with the episodes that were running if this process saved them."""
        super().load_state_dict(state)
        running, device = state.get("running"), self.env.device
        if running is not None and running["rank"] == self.rank:
            self.env.load_state_dict(running["env"])
            self._goes_on, self._return, self._age = (running[k].to(device) for k in ("goes_on", "return", "length"))

    def step(
        self,
        act: Callable[[Nested], Action],
        rows: TorchRows,
        obs: Nested,
        began: Int[Tensor, " row"],
        slot: Int[Tensor, ""],
        may_start: Bool[Tensor, ""],
        *seeds: Int[Tensor, " row"],
    ) -> StepOutput:
        """An action of all rows, a step, and new starts of groups that ended. A pure function of tensors.

        Args:
            began: slot at which each row's episode began.
            slot: number of the next slot.
            may_start: whether the window has that slot.
            seeds: of starts and of noise there, and the keys of starts.
        """
        action = act(obs)
        rows, result = self.env.stepped(rows, self.policy.env_action(action.action))
        if self.horizon is not None:
            cut = ~rows.paused & (slot - began >= self.horizon)
            rows, result = rows._replace(paused=rows.paused | cut), result._replace(truncated=result.truncated | cut)
        over = rows.paused.view(-1, self.group_size).all(dim=1)[self._group] & may_start  # of the whole group
        rows = self.env.started(rows, over, *seeds)
        return StepOutput(action, rows, self.env.observed(rows), result, (torch.where(over, slot, began),))

    def _seeds(self, num_steps: int) -> tuple[Int[Tensor, "slot row"], Int[Tensor, "slot row"]]:
        """Seeds of starts and of noise in groups that begin at each slot; the last ones are for the slot behind the window, where none does."""
        device = self.env.device
        number = self._group * num_steps + torch.arange(num_steps, device=device)[:, None]
        numbers = {"start": number, "noise": number}
        if self.collection.noise == "independent":
            numbers["noise"] = number * self.group_size + self._member
        seeds = {name: derive_seed(self.seed, name, self.rank, self.iteration) for name in numbers}
        start, noise = (hash_pair(torch.full((), seeds[name], device=device), numbers[name]) for name in numbers)
        return torch.cat([start, start[-1:]]), torch.cat([noise, noise[-1:]])
