"""Builds the components of a run on texts from a ``TextRunCfg``."""

from groupwise.errors import require_extra

require_extra("transformers", "text")

import logging
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from groupwise import serving
from groupwise.algorithms.base import BaseAlgorithm
from groupwise.config.algorithm import BCCfg, with_max_length, with_rewards
from groupwise.config.run import ServerGenerationCfg, TextRunCfg
from groupwise.data.rollout import TensorDict, transition_view
from groupwise.engines import Engine
from groupwise.errors import ConfigError, require_extra
from groupwise.policies.base import Policy
from groupwise.report.folder import RunFolder
from groupwise.seeding import derive_seed
from groupwise.speed.decoding import FastDecoder, fuse_norms
from groupwise.text.collector import (
    CompletionCollector,
    Dialogue,
    TextBuffer,
    TextCollector,
    TextRow,
    demonstrated_rows,
    text_rollout,
    verified_envs,
)
from groupwise.text.envs import TextEnvs, make_for
from groupwise.text.evaluation import TextEvaluator
from groupwise.text.generation import complete
from groupwise.text.load import load_causal_lm
from groupwise.text.policy import CausalLM
from groupwise.text.served import AsyncCollector, ServedCollector, ServedGenerator
from groupwise.text.task import Example, PromptEncoder, Start, TextTask
from groupwise.text.tool_env import env_of
from groupwise.training.build import (
    Components,
    UserObjects,
    algorithm_class,
    check_rollout_fits,
    first_weights,
    pick_device,
)
from groupwise.training.callbacks import CheckSamplerMismatch
from groupwise.training.checkpoint import Identity, initialize, load_checkpoint, load_policy
from groupwise.training.trainer import Callback, Trainer

# Collectors whose completions come from servers


def connect(cfg: TextRunCfg, policy: CausalLM, engine: Engine, *parts: Any, **options: Any) -> ServedCollector:
    """The collector of a run on servers: those that the settings name, or one that is started here. Further arguments are those
    of ``TextCollector``.
    """
    how = cfg.generation
    assert isinstance(how, ServerGenerationCfg)
    if engine.world_size > 1 and how.max_staleness:
        raise ConfigError(f"generation.max_staleness={how.max_staleness} needs one process; fix: max_staleness=0")
    if how.in_flight_updates and policy.has_adapters:
        raise ConfigError(
            "generation.in_flight_updates=True with adapters: servers finish a completion by the adapters that began it; fix: "
            "in_flight_updates=False, or lora=None"
        )
    if policy.has_adapters and any(one.to_dict().get("use_dora") for one in policy.model.peft_config.values()):
        raise ConfigError("vLLM takes no DoRA adapters; fix: generation='native', or model.lora.dora=False")
    limits: dict[str, Any] = {"timeout": how.timeout, "retries": how.retries}
    with ExitStack() as stack:
        folder = how.weights_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="groupwise-")))
        folder.mkdir(parents=True, exist_ok=True)
        clients = [serving.HttpClient(url, **limits) for url in how.urls]
        if how.python is not None:
            if engine.world_size > 1:
                raise ConfigError(f"{engine.world_size} processes cannot share a server of one; fix: generation.urls")
            own = serving.LocalServer(_command(cfg, how, policy), folder / "server.log", how.timeout)
            stack.callback(own.close)
            own.wait()
            clients = [serving.HttpClient(own.url, **limits, last_lines=partial(serving.last_lines, own.log))]
        how_loaded = {"adapters": policy.has_adapters, "in_flight_updates": how.in_flight_updates}
        servers = [serving.VLLMServer(client, **how_loaded) for client in clients]
        kind, cleanup = AsyncCollector if how.max_staleness else ServedCollector, ExitStack()
        collector = kind(ServedGenerator(servers, policy, folder, engine), cleanup, *parts, **options)
        cleanup.enter_context(stack.pop_all())  # an error before ends the server at once
    return collector


def _command(cfg: TextRunCfg, how: ServerGenerationCfg, policy: CausalLM) -> list[str]:
    """Starts a server of the model that training begins with."""
    model = policy.network.name_or_path
    if not model:
        raise ConfigError("a model made in Python is in no folder that a server could load; fix: model=..., or urls")
    dtype = "float32" if cfg.model.precision == "float32" else "bfloat16"
    rank = policy.model.peft_config["default"].r if policy.has_adapters else None
    assert how.python is not None
    return serving.command(how.python, model, ["--dtype", dtype, *how.args], lora_rank=rank)


SAMPLER_FIX = (
    "another precision, objective.importance_sampling_correction, a smaller generation.max_staleness, or other limits in "
    "sampler_mismatch"
)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextComponents(Components):
    """Components of a run on texts."""

    cfg: TextRunCfg
    collector: TextCollector | CompletionCollector
    task: TextTask
    held_out: list[Example]
    """Examples to evaluate on."""
    envs: TextEnvs | None = None
    """The text environment, whose starts were verified."""
    more_callbacks: tuple[Callback, ...] = ()

    def evaluator(self) -> TextEvaluator | None:
        """The evaluator on held-out prompts; None if there are none."""
        if isinstance(self.collector, CompletionCollector) and not self.cfg.task.rewards:
            return None
        if not self.held_out:
            log.warning("No evaluation during training: pass eval_data=... to hold out prompts.")
            return None
        seed = derive_seed(self.cfg.seed, "evaluation")
        envs = self.envs and self.envs.others()
        return TextEvaluator(self.task, self.held_out, self.cfg, self.policy, envs, seed=seed)

    def notes(self) -> list[str]:
        """Number of prompts and of trained parameters, and whether completions continue messages of the data."""
        parameters = list(self.policy.parameters())
        trained, whole = sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)
        what = "prompts" if self.envs is None else f"episodes of at most {self.cfg.task.max_turns} turns"
        lines = [
            f"{self.collector.data_size:,} {what}, {self.cfg.num_prompts} an iteration; {trained:,} of {whole:,} "
            f"parameters are trained; a step is a token of a completion"
        ]
        if self.cfg.model.init_from is not None:
            lines.append(f"The model began with the weights of {self.cfg.model.init_from}.")
        if self.envs is not None:
            lines.append(f"Group starts: {self.envs.report}.")
        prompts = [prompt.example.prompt for prompt in self.collector.prompts]
        if begun := sum(not isinstance(prompt, str) and prompt[-1]["role"] == "assistant" for prompt in prompts):
            lines.append(
                f"{begun:,} prompts end with an assistant's message, which the completion continues (a prefill). "
                "If it is the answer, leave it out of the prompt."
            )
        return lines

    def own_callbacks(self, folder: RunFolder) -> list[Callback]:
        """The check of sampler against trainer."""
        return [CheckSamplerMismatch(self.cfg.sampler_mismatch, SAMPLER_FIX), *self.more_callbacks]


def build_text_components(
    cfg: TextRunCfg, given: UserObjects, engine: Engine, *, restored: bool = False
) -> TextComponents:
    """The components of a run, from its settings; ``restored`` as of ``build``."""
    check_rollout_fits(cfg)
    task = TextTask.from_cfg(cfg.task, given)
    if isinstance(cfg.algorithm, BCCfg):
        return _cloning_components(cfg, given, engine, task, restored=restored)
    rewards = task.rewards(cfg.algorithm.on_nonfinite)
    train, held_out = task.load()
    if engine.world_size > 1 and cfg.algorithm.groups.collection.dynamic_sampling:
        raise ConfigError(
            "collection.dynamic_sampling takes a varying number of prompts, which several processes cannot divide; fix: "
            "dynamic_sampling=None, or one process"
        )
    cfg = cfg.model_copy(update={"algorithm": with_rewards(cfg.algorithm, rewards.weights)})
    algorithm = build_algorithm(cfg, given.policy, engine, restored=restored)
    policy = policy_to_train(algorithm)
    encoder = PromptEncoder(policy.tokenizer, cfg.task)
    with suppress(ConfigError, ValueError):  # a template without turns after the assistant's
        end, *_ = encoder.encode_answer([{"role": "tool", "content": "?"}]) if encoder.conversational else (None,)
        text = "" if end is None else encoder.tokenizer.decode([end])
        if (
            end in encoder.tokenizer.added_tokens_decoder
            and end not in policy.eos_ids
            and text not in cfg.sampling.stop
        ):
            log.warning("the template ends a turn by %s, which ends no completion; fix: sampling.stop=%s", text, [text])
    prompts = encoder.select(train, policy.max_prompt_length(cfg.sampling.max_new_tokens))
    of_episodes = ("environments", "episode_return") if cfg.task.has_env else ()
    rewards.check_columns((*prompts[0].example.columns, *of_episodes))
    if held_out:
        rewards.check_columns((*held_out[0].columns, *of_episodes), "eval_data")
    envs = verified_envs(cfg, task, encoder, policy, train)
    if (
        envs is not None
        and envs.kept
        and isinstance(cfg.generation, ServerGenerationCfg)
        and cfg.generation.max_staleness
    ):
        raise ConfigError(
            f"the environment draws from the process's {' and '.join(envs.kept)}, while another thread trains; fix: "
            "generation.max_staleness=0, or a generator of its own, as np.random.default_rng(seed)"
        )
    dialogue = Dialogue(encoder, policy.context_length, envs)
    buffer = TextBuffer(value=not policy.actor_only, on_nonfinite=cfg.algorithm.on_nonfinite)
    make: Callable[..., TextCollector] = partial(connect, cfg, policy, engine)
    if cfg.generation.name == "native":
        make = partial(TextCollector, policy, partial(complete, policy))
    collector = make(prompts, dialogue, rewards, cfg, rank=engine.rank, world_size=engine.world_size)
    return TextComponents(cfg, given, algorithm, collector, buffer, identity_of(cfg, policy), task, held_out, envs)


def policy_to_train(algorithm: BaseAlgorithm) -> CausalLM:
    """The algorithm's policy; a ``ConfigError`` if its weights are quantised, and it has no adapters to train and save."""
    policy = algorithm.policy
    assert isinstance(policy, CausalLM)
    if getattr(policy.network, "hf_quantizer", None) is not None and not policy.has_adapters:
        raise ConfigError(
            "the model's weights are quantised, which cannot be trained or saved again; fix: adapters, as lora={'r': 16}, or a model "
            "whose config.json has no quantization_config"
        )
    return policy


def _cloning_components(
    cfg: TextRunCfg, given: UserObjects, engine: Engine, task: TextTask, *, restored: bool
) -> TextComponents:
    """The components of a run that clones completions."""
    train, held_out = task.load(demos=True)
    algorithm = build_algorithm(cfg, given.policy, engine, restored=restored)
    policy = policy_to_train(algorithm)
    encoder, stops = PromptEncoder(policy.tokenizer, cfg.task), list(policy.sampling.stop)
    if (make := env_of(task)) is not None:
        with closing(make_for(make, Start(0))) as env:
            stops += env.stop
    rows, others = (
        demonstrated_rows(part, encoder, policy, tuple(stops)) if part else [] for part in (train, held_out)
    )
    collector = CompletionCollector(policy, rows, cfg, engine)
    buffer = TextBuffer(on_nonfinite=cfg.algorithm.on_nonfinite)
    scores = CompletionScores(algorithm, others, cfg.evaluation.interval)
    identity = identity_of(cfg, policy)
    return TextComponents(cfg, given, algorithm, collector, buffer, identity, task, held_out, more_callbacks=(scores,))


_SCORED_AT_ONCE = 32
"""Number of held-out rows in one forward pass."""


class CompletionScores(Callback):
    """Adds the loss of held-out rows to the metrics, whenever an evaluation is due."""

    def __init__(self, algorithm: BaseAlgorithm, rows: Sequence[TextRow], interval: int | None) -> None:
        self.algorithm, self.rows, self.interval = algorithm, rows, interval

    @torch.no_grad()
    def on_iteration_end(self, trainer: Trainer, rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Add ``eval/demo_loss``, the mean of ``-log_prob`` over all tokens of the model's turns."""
        if not self.rows or not (trainer.passed(self.interval) or trainer.is_done()):
            return
        policy, losses = self.algorithm.policy, []
        for first in range(0, len(self.rows), _SCORED_AT_ONCE):
            some = text_rollout(self.rows[first : first + _SCORED_AT_ONCE])
            inputs = self.algorithm.policy_inputs(transition_view(some))
            losses.append(-self.algorithm.score(policy, inputs).log_prob[inputs["loss_mask"]])
        metrics["eval/demo_loss"] = float(torch.cat(losses).double().mean())


def build_algorithm(cfg: TextRunCfg, given: Policy | None, engine: Engine, *, restored: bool = False) -> BaseAlgorithm:
    """The algorithm with its language model, which may be ``given``: all that learns, without prompts and rewards.

    Args:
        restored: the weights will come from a checkpoint of the run itself, so ``model.init_from`` is not read.
    """
    algorithm_type = algorithm_class(cfg.algorithm)
    actor_only: bool = algorithm_type.actor_only
    if given is None:
        with first_weights(cfg.seed):  # of adapters
            given = load_causal_lm(cfg.model, cfg.sampling, actor_only=actor_only, device=pick_device(cfg.device))
    if not isinstance(given, CausalLM):
        raise ConfigError(f"a text task needs a CausalLM; got {type(given).__name__}, fix: gw.CausalLM(model, ...)")
    policy = given.to(pick_device(cfg.device))
    if cfg.model.init_from is not None and not restored:
        log.info("%s", initialize(policy, cfg.model.init_from))
    if not restored and any(p.requires_grad and p.element_size() < 4 for p in policy.parameters()):
        log.warning(
            "weights are trained in half precision, where a step below 1/512 of a weight is lost to rounding: at small learning rates "
            "hardly any changes; fix: model.precision='autocast', or adapters (model.lora)"
        )
    if cfg.speed == "auto":
        policy.decoder = FastDecoder()
        if policy.device.type == "cuda":
            fuse_norms(policy.network)
    num_turns = cfg.task.max_turns if cfg.task.has_env else 1
    algorithm_cfg = with_max_length(cfg.algorithm, num_turns * cfg.sampling.max_new_tokens)
    algorithm: BaseAlgorithm = algorithm_type(algorithm_cfg, policy, engine, seed=derive_seed(cfg.seed, "algorithm"))
    return algorithm


def identity_of(cfg: TextRunCfg, policy: CausalLM) -> Identity:
    """The identity that a checkpoint must have: the data, and the model's class and sizes."""
    vocabulary, width = policy.head.shape
    return Identity(cfg.subject, f"{type(policy.network).__name__} of width {width}", f"{vocabulary} tokens")


def load_algorithm(
    cfg: TextRunCfg, given: Policy | None, folder: RunFolder, checkpoint: Literal["latest", "best"]
) -> BaseAlgorithm:
    """The algorithm of an earlier run with the policy of a checkpoint, without prompts, rewards and reference.

    A policy that the run was given in Python is ``given`` again, and gets the checkpoint's weights.
    """
    if cfg.algorithm.has_reference:  # it would be a second model in memory, which only training reads
        cfg = cfg.model_copy(update={"algorithm": cfg.algorithm.model_copy(update={"kl_coef": 0.0})})
    algorithm = build_algorithm(cfg, given, Engine(), restored=True)
    policy = algorithm.policy
    assert isinstance(policy, CausalLM)
    where = folder.checkpoints / checkpoint
    load_policy(policy, load_checkpoint(where, identity_of(cfg, policy), policy).policy, where)
    return algorithm
