"""The control policy with a memory: its actions depend on earlier observations of the episode, too."""

from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from groupwise.config.policy import RecurrentCfg
from groupwise.data.rollout import Nested
from groupwise.errors import DataError
from groupwise.policies.actor_critic import ActorCritic, ObsEncoder
from groupwise.policies.base import Action, Batch, Evaluation, with_state

_DEFAULT = RecurrentCfg()


class RecurrentEncoder(ObsEncoder):
    """Features of observations, and of those before them in the episode: those of ``ObsEncoder`` through an LSTM or GRU.

    Weights start orthogonal and biases 0, as in CleanRL's ``ppo_atari_lstm``.
    """

    def __init__(self, space: Any, cfg: RecurrentCfg) -> None:
        super().__init__(space, cfg)
        kind: Any = {"lstm": nn.LSTM, "gru": nn.GRU}[cfg.cell]
        self.layer = kind(self.num_features, cfg.hidden_size)
        for name, parameter in self.layer.named_parameters():
            nn.init.orthogonal_(parameter) if "weight" in name else nn.init.zeros_(parameter)
        self.num_features = cfg.hidden_size
        self.state_size = cfg.hidden_size * (2 if cfg.cell == "lstm" else 1)

    def follow(
        self, obs: Nested, state: Float[Tensor, "sequence state"], batch_sizes: Int[Tensor, " step"]
    ) -> tuple[Float[Tensor, "element feature"], Float[Tensor, "sequence state"]]:
        """Features of each observation of some sequences, and the states at their ends.

        Args:
            obs: in the order of a ``PackedSequence``.
            state: at the beginnings; an LSTM's output and cell, one after the other.
            batch_sizes: those of the ``PackedSequence``, on the CPU.
        """
        x = self(obs).to(self.layer.weight_hh_l0.dtype)
        if not len(x):
            return x.new_zeros(0, self.num_features), state
        parts = tuple(part.contiguous() for part in torch.split(state.to(x).unsqueeze(0), self.num_features, dim=-1))
        out, end = self.layer(PackedSequence(x, batch_sizes), parts if len(parts) > 1 else parts[0])
        return out.data, (torch.cat(end, dim=-1) if isinstance(end, tuple) else end)[0]


class RecurrentActorCritic(ActorCritic):
    """An ``ActorCritic`` whose actor and critic see their encoder's features through an LSTM or GRU each.

    With ``cfg.trunk="shared"`` they share it. The state is 0 at the beginning of an episode. ``evaluate`` runs through the
    episodes of each row from the states that the rollout stored, with gradients through time back to the row's beginning.
    Arguments and errors as of ``ActorCritic``; networks of yours map the layer's ``hidden_size`` outputs.
    """

    scored_by = "row"
    batch_keys = ("obs", "action", "state", "step")
    encoder_class = RecurrentEncoder
    cfg: RecurrentCfg
    encoder: RecurrentEncoder
    critic_encoder: RecurrentEncoder | None

    def __init__(
        self, observation_space: Any, action_space: Any, cfg: RecurrentCfg = _DEFAULT, **arguments: Any
    ) -> None:
        super().__init__(observation_space, action_space, cfg, **arguments)
        self.state_size = sum(encoder.state_size for encoder in self._encoders())

    @torch.no_grad()
    def act(self, obs: Nested, deterministic: bool = False, generator: torch.Generator | None = None) -> Action:
        """Actions for B observations ``{"obs": [B, ...], "state": [B, S]}``, and the states that follow."""
        params, value, state = self._step(obs)
        action = self.head.mode(params) if deterministic else self.head.sample(params, generator)
        return Action(action, self.head.log_prob(params, action), value, state)

    @torch.no_grad()
    def value(self, obs: Nested) -> Tensor:
        """V of shape [B] of observations with states, without gradient."""
        value = self._step(obs)[1]
        return super().value(obs) if value is None else value

    def evaluate(self, batch: Batch) -> Evaluation:
        """Scores of the actions of whole rows ``[B, T]``, with gradient; 0 where a row is not valid."""
        at = Packing.of(batch["valid"], batch["step"])
        obs, action, state = (batch[key][at.row, at.slot] for key in ("obs", "action", "state"))
        params, value, _ = self._follow(obs, state[: int(at.batch_sizes[:1].sum())], at.batch_sizes)
        log_prob, entropy = self.head.score(params, action)
        shape = batch["valid"].shape
        return Evaluation(
            at.unpacked(log_prob, shape),
            at.unpacked(entropy, shape),
            None if value is None else at.unpacked(value, shape),
            at.unpacked(params, shape),
        )

    @torch.no_grad()
    def predict(
        self,
        obs: Any,
        deterministic: bool = True,
        *,
        state: npt.ArrayLike | None = None,
        episode_start: npt.ArrayLike | None = None,
    ) -> Any:
        """``(actions, state)``, as in Stable-Baselines3: give the state back with the next observations.

        Args:
            state: the actor's, from the last call; None where all episodes begin.
            episode_start: ``[B]`` True where an episode begins.

        Raises:
            DataError: as ``ActorCritic.predict``; or a state, or beginnings, of another number of observations.
        """
        tensor, batched = self._read(obs)
        rows, shape = len(tensor), (len(tensor), self.encoder.state_size)
        given = torch.zeros(shape) if state is None else torch.as_tensor(state)
        begins = torch.zeros(rows) if episode_start is None else torch.as_tensor(episode_start).reshape(-1)
        if given.shape != shape or len(begins) != rows:
            raise DataError(
                f"state has shape {list(given.shape)} and episode_start {list(begins.shape)}, expected {list(shape)} and "
                f"[{rows}]; fix: the state of the last call, for as many observations"
            )
        given = given.to(self.device).masked_fill(begins.bool().unsqueeze(-1).to(self.device), 0.0)
        normalized = tensor if self.obs_normalizer is None else self.obs_normalizer(tensor)
        features, end = self.encoder.follow(normalized, given, torch.tensor([rows]))
        params, _ = self._heads(features, None, tensor)
        action = self.head.mode(params) if deterministic else self.head.sample(params)
        return self._written(action, batched), end.cpu().numpy()

    def without_critic(self) -> "RecurrentActorCritic":
        """A copy that only acts; its state is the actor's."""
        actor = super().without_critic()
        assert isinstance(actor, RecurrentActorCritic)
        actor.state_size = self.encoder.state_size
        return actor

    def player(self) -> "RecurrentPlayer":
        """A player of episodes that begin now, which keeps the hidden state."""
        return RecurrentPlayer(self)

    def _step(self, obs: Nested) -> tuple[Tensor, Tensor | None, Tensor]:
        """``_follow`` for one more observation of each row; a ``DataError`` if it has no state."""
        if isinstance(obs, Tensor) or "state" not in obs:
            raise DataError(
                "a recurrent policy acts on an observation and its state, got an observation alone; fix: policy.player(), "
                "whose act and predict remember"
            )
        state = obs["state"]
        return self._follow(obs["obs"], state, torch.tensor([len(state)]))

    def _follow(
        self, obs: Nested, state: Float[Tensor, "sequence state"], batch_sizes: Int[Tensor, " step"]
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Parameters of the action distributions, values if there is a critic, and the states at the ends of the sequences."""
        encoders = self._encoders()
        normalized = obs if self.obs_normalizer is None else self.obs_normalizer(obs)
        states = torch.split(state, [encoder.state_size for encoder in encoders], dim=-1)
        followed = [one.follow(normalized, part, batch_sizes) for one, part in zip(encoders, states, strict=True)]
        params, value = self._heads(followed[0][0], followed[-1][0], obs)
        return params, value, torch.cat([end for _, end in followed], dim=-1)

    def _encoders(self) -> list[RecurrentEncoder]:
        """The actor's encoder, followed by the critic's if it has one of its own."""
        return [self.encoder] if self.critic_encoder is None else [self.encoder, self.critic_encoder]

    def zero_state(self, rows: int) -> Float[Tensor, "row state"]:
        """State at the beginning of episodes."""
        return torch.zeros(rows, self.state_size, device=self.device)


class RecurrentPlayer:
    """Plays one episode in each row. The policy's state begins at 0; ``act`` and ``predict`` share it."""

    def __init__(self, policy: RecurrentActorCritic) -> None:
        self._policy = policy.without_critic()  # whose state is the same for both
        self._state: Tensor | None = None

    def act(self, obs: Nested, deterministic: bool = False, generator: torch.Generator | None = None) -> Action:
        """Acts on the next observations, as ``Policy.act`` does."""
        state = self._policy.zero_state(len(obs)) if self._state is None else self._state
        action = self._policy.act(with_state(obs, state), deterministic, generator)
        self._state = action.state
        return action

    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """Predicts from the next observations, as ``Policy.predict`` does."""
        action, state = self._policy.predict(obs, deterministic, state=self._state)
        self._state = torch.from_numpy(state).to(self._policy.device)
        return action


class Packing(NamedTuple):
    """Where the elements of a ``PackedSequence`` are in rows ``[B, T]``.

    A sequence is an episode, or the part of it that a row has. Sequences of all rows run side by side, longest first.
    """

    row: Int[Tensor, " element"]
    slot: Int[Tensor, " element"]
    batch_sizes: Int[Tensor, " step"]
    """Sequences that have a first, second, ... element; those first elements come first. On the CPU."""

    @classmethod
    def of(cls, valid: Bool[Tensor, "row slot"], step: Int[Tensor, "row slot"]) -> "Packing":
        """The sequences of all valid slots.

        Args:
            step: number within the episode; one begins where it is 0.
        """
        begins = valid.clone()
        begins[:, 1:] &= (step[:, 1:] == 0) | ~valid[:, :-1]
        number = begins.flatten().cumsum(0)[valid.flatten()] - 1
        length = torch.bincount(number)
        place = torch.arange(len(number), device=valid.device) - (length.cumsum(0) - length)[number]
        rank = length.argsort(descending=True, stable=True).argsort()
        order = (place * len(length) + rank[number]).argsort()
        row, slot = valid.nonzero()[order].unbind(dim=1)
        return cls(row, slot, torch.bincount(place).cpu())

    def unpacked(self, x: Tensor, shape: torch.Size) -> Tensor:
        """``x`` ``[element, ...]`` in rows ``[*shape, ...]``, 0 elsewhere."""
        return x.new_zeros(*shape, *x.shape[1:]).index_put((self.row, self.slot), x)
