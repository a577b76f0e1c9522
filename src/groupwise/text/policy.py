"""A causal language model as a policy: the observation is a token in its context, the action the next token.

Scores are those of the sampling distribution, temperature included.
"""

import copy
import functools
import inspect
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from groupwise.config.policy import SamplingCfg
from groupwise.data.rollout import TensorDict, TensorSpec
from groupwise.errors import ConfigError, SlowPathWarning
from groupwise.policies.base import Action, Batch, Evaluation, Policy
from groupwise.text.generation import Decoder, complete, left_padded
from groupwise.text.vocabulary import penalized_scores, token_scores

# Prefix sharing: the common prefix of a group's rows goes through the model once


class Prefixes(NamedTuple):
    """Rows ``[N, T]`` cut into U common prefixes and N suffixes."""

    number: Int[Tensor, " row"]
    """Index of each row's prefix."""
    head: Int[Tensor, "prefix head"]
    """Tokens of the prefixes, padded on the left."""
    head_valid: Bool[Tensor, "prefix head"]
    tail: Int[Tensor, "row tail"]
    """Tokens of the suffixes, padded on the right."""
    tail_valid: Bool[Tensor, "row tail"]
    length: Int[Tensor, " row"]
    """Tokens of each row's prefix."""

    def gather(
        self,
        head: Float[Tensor, "prefix head width"],
        tail: Float[Tensor, "row tail width"],
        row: Int[Tensor, " token"],
        place: Int[Tensor, " token"],
    ) -> Float[Tensor, "token width"]:
        """The values at these slots, from the two parts."""
        length, number = self.length[row], self.number[row]
        in_head = number * head.shape[1] + head.shape[1] - length + place
        in_tail = head.shape[0] * head.shape[1] + row * tail.shape[1] + place - length
        both, chosen = (
            torch.cat([head.flatten(0, 1), tail.flatten(0, 1)]),
            torch.where(place < length, in_head, in_tail),
        )
        return both[chosen.to(both.device, non_blocking=True)]


@torch.no_grad()
def find_prefixes(
    tokens: Int[Tensor, "row step"], valid: Bool[Tensor, "row step"], group: Int[Tensor, "row step"]
) -> Prefixes | None:
    """The longest common prefix of each group's rows, which are padded on the right; None if no two rows share one.

    A row keeps at least one token for itself, so that every suffix has a part in the second pass. It is computed on the CPU: on a
    GPU, each size would be waited for.
    """
    tokens, valid, group = tokens.cpu(), valid.cpu(), group.cpu()
    rows, place = torch.arange(len(tokens)), torch.arange(tokens.shape[1])
    known, number = torch.unique(group[:, 0], return_inverse=True)
    if len(known) == len(tokens):
        return None
    total = valid.sum(dim=1)
    first = rows.new_full((len(known),), len(tokens)).scatter_reduce(0, number, rows, "amin")
    alike = (tokens == tokens[first[number]]) & (place < total[:, None] - 1)
    common = alike.long().cumprod(dim=1).sum(dim=1)
    shared = common.new_full((len(known),), tokens.shape[1]).scatter_reduce(0, number, common, "amin")
    alone = torch.bincount(number) == 1  # such a row shares all of itself, which would make every head as wide
    shared[alone] = shared[alone].clamp(max=int(shared[~alone].amax()))
    if int(shared.min()) < 1:
        return None
    width, length = int(shared.max()), shared[number]
    back = torch.arange(width) - width + shared[:, None]
    ahead = torch.arange(int((total - length).max())) + length[:, None]
    return Prefixes(
        number=number,
        head=tokens[first].gather(1, back.clamp(min=0)),
        head_valid=back >= 0,
        tail=tokens.gather(1, ahead.clamp(max=tokens.shape[1] - 1)),
        tail_valid=ahead < total[:, None],
        length=length,
    )


@contextmanager
def _without_cudnn(inner: AbstractContextManager[Any]) -> Iterator[None]:
    with inner, sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


TOKEN = TensorSpec((), torch.int64)
"""An observation, and an action."""
_TOLERANCE = 0.02
"""Largest difference of logits, relative to the largest logit; bfloat16 rounds to 0.004."""
_ROUNDING = {"float32": 1e-3, "coarse": 0.1}
"""Largest root mean square difference of log-probabilities, in nats. Rounding makes 1e-5 in float32, up to 0.03 in bfloat16."""


class CausalLM(Policy):
    """Scores tokens with a transformers model, plain or with adapters by peft; dropout is off in every mode.

    The common prefix of a group's rows goes through the model once. At the first such rows, a few tokens are scored in both ways; if the
    scores differ, or the model's cache does not allow it, prefixes are not shared, and a ``SlowPathWarning`` says why.
    ``state_dict`` holds the trained parameters alone (all, if none are trained), each tensor once.

    Args:
        model: what ``AutoModelForCausalLM`` loads, or peft's model around it.
        eos_ids: tokens that end a completion; by default the model's own and the tokenizer's.
        actor_only: False adds a value head: a linear layer in float32 on the last hidden state, 0 at first.
        autocast: type of matrix products, in training and sampling. None: that of the weights.
        gradient_checkpointing: recompute layers in the backward pass.

    Raises:
        ConfigError: the model's logits are not its hidden states times its output embeddings, it keeps a state that completions
            cannot begin with, or the tokenizer does not fit.
    """

    scored_by = "row"
    gives_distribution = False
    batch_keys: tuple[str, ...] = ("obs", "action", "valid", "group_id")
    value_modules = ("value_head",)

    def __init__(
        self,
        model: nn.Module,
        sampling: SamplingCfg | Mapping[str, Any] | None = None,
        eos_ids: Sequence[int] | None = None,
        *,
        actor_only: bool = True,
        tokenizer: Any = None,
        autocast: torch.dtype | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model = {model!r:.80}: expected a module; fix: AutoModelForCausalLM.from_pretrained(...), or in place of the policy "
                "gw.train(..., model='path-or-hub-id')"
            )
        self.model: Any = model
        self.sampling = sampling if isinstance(sampling, SamplingCfg) else SamplingCfg(**dict(sampling or {}))
        self.actor_only, self.tokenizer, self.autocast = actor_only, tokenizer, autocast
        self.action_spec = TOKEN
        self.batch_keys += ("support",) * self.sampling.has_filters + ("turn_id",) * self.sampling.has_penalties
        peft = sys.modules.get("peft")  # imported by the code that made a model with adapters
        self.has_adapters = peft is not None and isinstance(model, peft.PeftModel)
        """Whether the model has adapters by peft."""
        silence_dropout(model)  # with dropout, sampler and trainer would be two different policies
        self.eval()
        if eos_ids is None:
            own = self.network.generation_config.eos_token_id
            own = self.network.config.eos_token_id if own is None else own
            listed = [*(own if isinstance(own, list | tuple) else [own]), getattr(tokenizer, "eos_token_id", None)]
            eos_ids = [int(token) for token in listed if token is not None]
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        known = inspect.signature(self.network.base_model.forward).parameters
        self.cache_argument = "cache" if "cache" in known else "past_key_values"
        """The argument of the model's pass that takes a cache; it changed its name with transformers 5.24."""
        self._check_head()
        if wrong := [token for token in self.eos_ids if not 0 <= token < len(self.head)]:
            raise ConfigError(
                f"eos_token_id = {wrong[0]} is no token of the model, which has {len(self.head):,}; fix: that of its config.json and "
                "generation_config.json"
            )
        self._check_states()
        self.value_head: nn.Linear | None = None
        if not actor_only:
            if not any(parameter.requires_grad for parameter in model.parameters()):
                raise ConfigError(
                    "no parameter of the model has requires_grad=True, so the value head alone would be trained; fix: "
                    "model.requires_grad_(True), or for adapters PeftModel.from_pretrained(..., is_trainable=True)"
                )
            self.value_head = nn.Linear(self.head.shape[1], 1, device=self.device, dtype=torch.float32)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        if gradient_checkpointing:
            recompute_layers(self.network)
        self.decoder = Decoder()
        """The decoding step in generation."""
        named = dict(self.named_parameters())  # each by its first name, as weights may be tied
        trained = {name for name, parameter in named.items() if parameter.requires_grad}
        self.save_only((trained or set(named)) | {name for name, _ in self.named_buffers()})

    def train(self, mode: bool = True) -> "CausalLM":
        """Set the mode, but keep layers quantised by bitsandbytes in training mode."""
        # in evaluation mode, some CPUs repack their weights for a kernel without a backward pass; 8-bit ones round activations
        super().train(mode)
        if (library := sys.modules.get("bitsandbytes")) is not None:  # imported by the code that made such layers
            for module in self.modules():
                if isinstance(module, library.nn.Linear4bit | library.nn.Linear8bitLt):
                    module.train()
        return self

    @property
    def network(self) -> Any:
        """The transformers model, adapters included."""
        return self.model.get_base_model() if self.has_adapters else self.model

    @property
    def head(self) -> Float[Tensor, "vocabulary width"]:
        """Weights of the output embeddings."""
        weight: Tensor = self.network.get_output_embeddings().weight
        return weight

    @property
    def rounding(self) -> float:
        """Largest root mean square difference of log-probabilities, in nats, that counts as rounding."""
        exact = self.autocast is None and all(p.dtype == torch.float32 for p in self.network.parameters())
        return _ROUNDING["float32" if exact else "coarse"]

    @property
    def context_length(self) -> int | None:
        """Number of the model's positions; None if its config has no limit."""
        return getattr(self.network.config.get_text_config(), "max_position_embeddings", None)

    def max_prompt_length(self, max_new_tokens: int, of: str = "sampling") -> int | None:
        """Most tokens of a prompt; None if the model has no limit. A ``ConfigError`` if none are left."""
        length = self.context_length
        if length is not None and max_new_tokens >= length:
            raise ConfigError(
                f"{of}.max_new_tokens={max_new_tokens} leaves no room for a prompt: the model has positions for {length} "
                f"tokens; fix: at most {length - 1}, less the longest prompt"
            )
        return None if length is None else length - max_new_tokens

    def evaluate(self, batch: Batch) -> Evaluation:
        """Scores of the tokens in ``loss_mask``; zeros elsewhere."""
        place, sampling = batch["loss_mask"].cpu().nonzero(as_tuple=True), self.sampling
        hidden = self._hidden(batch["obs"], batch["valid"], batch["group_id"], *place)
        batch = {key: batch[key].to(self.device, non_blocking=True) for key in (*self.batch_keys, "loss_mask")}
        place, mask = tuple(index.to(self.device, non_blocking=True) for index in place), batch["loss_mask"]
        score = token_scores
        if sampling.has_penalties:
            eos = torch.tensor(self.eos_ids, dtype=torch.long, device=self.device)
            score = functools.partial(penalized_scores, batch, sampling, eos=eos)
        support = batch["support"][place] if sampling.has_filters else None
        scores = score(hidden, self.head, batch["action"][place], temperature=sampling.temperature, support=support)
        log_prob, entropy = (torch.zeros_like(mask, dtype=torch.float32).index_put(place, one) for one in scores)
        return Evaluation(log_prob, entropy, None if self.value_head is None else self._value(hidden, mask))

    @torch.no_grad()
    def values(self, rollout: TensorDict) -> Float[Tensor, "row slot"]:
        """V of the text up to and including each slot's token, ``[N, T+1]``: at valid slots and the one after them; else 0.

        So ``value`` is ``values[:, :-1]`` and ``next_value`` is ``values[:, 1:]``. All rows are one batch.
        """
        filled = rollout["valid"].to("cpu", copy=True)
        filled[:, 1:] |= filled[:, :-1].clone()
        hidden = self._hidden(rollout["obs"], filled, rollout["group_id"], *filled.nonzero(as_tuple=True))
        return self._value(hidden, filled.to(self.device)).to(rollout["valid"].device)

    def hidden_states(
        self, tokens: Int[Tensor, "row step"], valid: Bool[Tensor, "row context"], cache: Any = None
    ) -> Float[Tensor, "row step width"]:
        """Last hidden states of the tokens; positions count from each row's first valid token.

        ``valid`` is False at padding, of the tokens in the cache and the new ones. The cache of transformers is extended.
        """
        # attention never sees padding on the right: without a mask it takes its fast path
        mask = position = None
        if tokens.shape[1] < valid.shape[1] or bool((valid[:, 1:] & ~valid[:, :-1]).any()):
            mask, position = valid.long(), (valid.cumsum(dim=1) - 1).clamp(min=0)[:, valid.shape[1] - tokens.shape[1] :]
        named = {"input_ids": tokens, "attention_mask": mask, "position_ids": position}
        inputs = {name: None if one is None else one.to(self.device, non_blocking=True) for name, one in named.items()}
        with self.computing():
            output = self.network.base_model(**inputs, **{self.cache_argument: cache}, use_cache=cache is not None)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def blocks(self) -> list[nn.Module]:
        """Modules that compute one after the other, of which a rank may hold one at a time; the rest belongs to all of them."""
        layers = decoder_layers(self.network)
        return layers if self.value_head is None else [*layers, self.value_head]

    def computing(self) -> AbstractContextManager[Any]:
        """The context of every forward pass: autocast, and on GPUs no attention by cuDNN, which plans anew for each shape.

        Around several passes without gradient, weights are cast once.
        """
        precision = nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)
        return _without_cudnn(precision) if self.device.type == "cuda" else precision

    @torch.no_grad()
    def act(self, obs: Any, deterministic: bool = False, generator: torch.Generator | None = None) -> Action:
        """The next token of B contexts: token ids ``[B, T]``, or a sequence of ids for each.

        Its log-probability is that of the sampling distribution. To penalties the context is a prompt; it may end at once.
        """
        ids = obs.tolist() if isinstance(obs, Tensor) else obs
        seeds = torch.randint(2**31, (len(ids), 1), generator=generator, device=self.device)
        once = self.sampling.model_copy(update={"max_new_tokens": 1, "min_new_tokens": 0, "stop": ()})
        completions = [one for (one,) in complete(self, ids, seeds, once, deterministic=deterministic)]
        token = torch.tensor([one.tokens[0] for one in completions], device=self.device)
        log_prob = torch.tensor([one.log_probs[0] for one in completions], dtype=torch.float32, device=self.device)
        if self.value_head is None:
            return Action(token, log_prob)
        hidden = self.hidden_states(*left_padded(ids, self.device))[:, -1]
        return Action(token, log_prob, self.value_head(hidden.float())[:, 0])

    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """The completion of a prompt, a text or a list of messages, as text; of a list of prompts, a list."""
        from groupwise.text.evaluation import is_single, read_prompts, write_texts

        seed = 0 if deterministic else int(torch.randint(2**31, ()))
        read, sampling = read_prompts(obs), self.sampling
        texts = write_texts(self, read, 1, sampling=sampling, deterministic=deterministic, seed=seed)
        return texts[0][0] if is_single(obs) else [text for (text,) in texts]

    def make_reference(self) -> Policy:
        """A frozen policy that scores like this one does now; with adapters it shares the base model."""
        if not self.has_adapters:
            return super().make_reference()
        shared = [self.tokenizer, *(parameter for parameter in self.parameters() if not parameter.requires_grad)]
        return copy.deepcopy(self, {id(one): one for one in shared}).requires_grad_(False).eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a transformers folder, or with adapters peft's, and the tokenizer; without the value head."""
        self.save_model(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    def save_model(self, folder: str | Path) -> None:
        """Write the same without the tokenizer."""
        # otherwise peft asks the hub whether the base's vocabulary has changed
        more = {"save_embedding_layers": False} if self.has_adapters else {}
        self.model.save_pretrained(folder, **more)

    def _hidden(
        self, tokens: Tensor, valid: Tensor, group: Tensor, row: Tensor, place: Tensor
    ) -> Float[Tensor, "token width"]:
        """Hidden states at these tokens."""
        prefixes = find_prefixes(tokens, valid, group)
        if prefixes is not None and self.shares_prefixes:
            return self._hidden_shared(prefixes, row, place)
        width = max(1, int(valid.sum(dim=1).max()))  # these rows may be shorter than the rollout's widest
        hidden = self.hidden_states(tokens[:, :width], valid[:, :width])
        return hidden[row.to(self.device, non_blocking=True), place.to(self.device, non_blocking=True)]

    def _hidden_shared(self, prefixes: Prefixes, row: Tensor, place: Tensor) -> Float[Tensor, "token width"]:
        """Hidden states at these tokens, each prefix encoded once; a ``ConfigError`` if the cache forbids it."""
        cache = prefix_cache(self.network.config)
        with self.computing():  # around both, so that weights are cast once
            head = self.hidden_states(prefixes.head, prefixes.head_valid, cache)
            cache = suffix_cache(self.network.config, cache, prefixes.number.to(self.device, non_blocking=True))
            context = torch.cat([prefixes.head_valid[prefixes.number], prefixes.tail_valid], dim=1)
            tail = self.hidden_states(prefixes.tail, context, cache)
        return prefixes.gather(head, tail, row, place)

    @functools.cached_property
    @torch.no_grad()
    def shares_prefixes(self) -> bool:
        """Whether a group's prompt is encoded once: if that gives a few rows of two groups the scores that they have alone."""
        tokens = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [6, 7, 0, 0, 0], [6, 8, 0, 0, 0]]) % len(self.head)
        valid = torch.arange(5) < torch.tensor([[5], [5], [2], [2]])
        group = torch.tensor([[0], [0], [1], [1]]).expand_as(tokens)
        prefixes = find_prefixes(tokens, valid, group)
        assert prefixes is not None
        try:
            shared = self._hidden_shared(prefixes, *valid.nonzero(as_tuple=True))
            ways = (shared, self.hidden_states(tokens, valid)[valid])
        except ConfigError as error:
            why = str(error)
        else:
            temperature, read = self.sampling.temperature, tokens[valid].to(self.device)
            one, other = (token_scores(hidden, self.head, read, temperature=temperature)[0] for hidden in ways)
            off = float((one - other).square().mean().sqrt())
            if off <= self.rounding:
                return True
            why = f"its log-probabilities differ by {off:.2g} with a cache, more than {self.rounding}"
        message = f"{type(self.network).__name__} encodes each group's prompt once per completion (no prefix sharing)"
        warnings.warn(f"{message}: {why}", SlowPathWarning, stacklevel=4)
        return False

    def _value(self, hidden: Tensor, mask: Tensor) -> Float[Tensor, "row step"]:
        if self.value_head is None:
            raise TypeError("an actor_only CausalLM has no value; fix: CausalLM(model, actor_only=False)")
        value: Tensor = self.value_head(hidden.float())
        return torch.zeros_like(mask, dtype=torch.float32).masked_scatter(mask, value[:, 0])

    @torch.no_grad()
    def _check_states(self) -> None:
        """Refuse models that keep other states than keys and values, unless rows that generation padded, repeated and continued
        are scored as whole ones.
        """
        name, cache = type(self.network).__name__, DynamicCache(config=self.network.config)
        off = math.inf
        if self.cache_argument in inspect.signature(self.network.base_model.forward).parameters:
            if all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
                return
            one, other, ends = [1, 2, 3], [4], [5, 6, 7]
            valid = torch.tensor([[True] * 3, [False, False, True]], device=self.device)
            self.hidden_states(self._tokens([one, [0, 0, *other]]), valid, cache)
            rows = torch.tensor([1, 0, 0], device=self.device)
            cache.reorder_cache(rows)
            valid = torch.cat([valid[rows], valid.new_ones(3, 1)], dim=1)
            ours = self.hidden_states(self._tokens([[end] for end in ends]), valid, cache)[:, 0].float()
            whole = [self._tokens([[*row, end]]) for row, end in zip((other, one, one), ends, strict=True)]
            theirs = torch.cat([self.hidden_states(row, torch.ones_like(row).bool())[:, -1] for row in whole]).float()
            off = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))
        if not off <= self.rounding:
            raise ConfigError(
                f"{name} keeps a state of the text that cannot begin several completions, or not after padding; fix: a model "
                "whose layers attend to all tokens, such as Llama, Qwen or GPT-2, or a hybrid such as Qwen3.5 or Granite 4"
            )

    def _tokens(self, rows: Sequence[Sequence[int]]) -> Int[Tensor, "row step"]:
        return torch.tensor(rows, device=self.device) % len(self.head)

    @torch.no_grad()
    def _check_head(self) -> None:
        """Refuse models whose logits are not the head's, compared on a few tokens, and tokenizers that do not fit."""
        name, embeddings = type(self.network).__name__, self.network.get_output_embeddings()
        for adapters in self.model.peft_config.values() if self.has_adapters else ():
            if adapters.is_prompt_learning:
                raise ConfigError(
                    f"adapters of peft's type {adapters.peft_type.value} are tokens before the prompt; fix: LoRA, or another "
                    "type that changes layers"
                )
        if embeddings is None or self.network.config.is_encoder_decoder:
            raise ConfigError(f"{name} is no causal language model, such as Llama, Qwen or GPT-2; fix: another model")
        parts = [part for part, _ in embeddings.named_parameters()]
        if parts != ["weight"]:
            raise ConfigError(
                f"the output embeddings of {name} are {parts}, expected a weight alone; fix: no adapter or bias there"
            )
        if self.tokenizer is not None and len(self.tokenizer) > len(self.head):
            raise ConfigError(
                f"the tokenizer has {len(self.tokenizer)} tokens, and {name} only {len(self.head)}; fix: that model's tokenizer"
            )
        tokens = torch.arange(4, device=self.device)[None] % len(self.head)
        hidden = self.hidden_states(tokens, torch.ones_like(tokens, dtype=torch.bool))
        with self.computing():
            theirs = self.network(input_ids=tokens).logits[0].float()
        ours = hidden[0].float() @ self.head.float().T
        off = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))
        # a cap, such as Gemma 2's, hardly changes small logits
        config = vars(self.network.config.get_text_config())
        caps = [key for key in config if "logit" in key and "cap" in key and not key.startswith("attn") and config[key]]
        if off > _TOLERANCE or caps:
            why = f"its config has {caps[0]}={config[caps[0]]}" if caps else f"they differ by {off:.1%}"
            raise ConfigError(
                f"the logits of {name} are not its hidden states times its output embeddings: {why}; "
                "fix: a model whose logits are not scaled, capped or biased"
            )


# Changes to transformers models for training: no dropout, gradient checkpointing, shared prefixes


def silence_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0, also those in attributes of modules: attention, layer drop, routers' jitter."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


def decoder_layers(model: nn.Module) -> list[Any]:
    """The layers that a model repeats."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute_layers(model: nn.Module) -> None:
    """Gradient checkpointing. transformers' own switch needs training mode, and disables the cache for shared prefixes."""
    layers = decoder_layers(model)
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no layers for gradient checkpointing; fix: gradient_checkpointing=False"
        )
    for layer in layers:
        layer.forward = MethodType(_forward_recomputed, layer)  # bound, so that it can be copied


def _forward_recomputed(layer: Any, *args: Any, **kwargs: Any) -> Any:
    forward = type(layer).forward
    if not torch.is_grad_enabled():  # sampling: `checkpoint` would do the same, slower
        return forward(layer, *args, **kwargs)
    return checkpoint(forward, layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class PrefixCacheLayer(DynamicLayer):  # type: ignore[misc]  # mypy does not follow transformers
    """A layer's cache that keeps the keys and values of one pass, with their gradient."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new keys and values."""
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states


class SuffixCacheLayer(DynamicLayer):  # type: ignore[misc]
    """A layer's cache of prefixes that is only read, so that the suffixes may be recomputed."""

    def __init__(self, prefix: PrefixCacheLayer, number: Int[Tensor, " row"]) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = prefix.keys, prefix.values, True
        self.number = number

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of each row's prefix and suffix."""
        keys, values = self.keys[self.number], self.values[self.number]
        return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)


def prefix_cache(config: Any) -> Any:
    """An empty cache for a pass over prefixes; a ``ConfigError`` if it is not the keys and values of all tokens."""
    cache: Any = DynamicCache(config=config)
    odd = {type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer}
    if odd:
        raise ConfigError(f"its cache has a {' and a '.join(sorted(odd))}, not the keys and values of every token")
    cache.layers = [PrefixCacheLayer() for _ in cache.layers]
    return cache


def suffix_cache(config: Any, prefixes: Any, number: Int[Tensor, " row"]) -> Any:
    """The cache for a pass over suffixes; ``prefixes`` is a filled ``prefix_cache``, ``number`` the prefix of each row."""
    cache: Any = DynamicCache(config=config)
    cache.layers = [SuffixCacheLayer(layer, number) for layer in prefixes.layers]
    return cache
