"""The plan of a run: whether it fits, how long a step takes, and what to change."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from groupwise.config.generation import ServerGenerationCfg
from groupwise.config.policy import LoRACfg
from groupwise.config.run import TextRunCfg
from groupwise.planning.gpus import GPU, Assumptions
from groupwise.planning.memory import Memory, memory_of, rows_at_once
from groupwise.planning.seconds import seconds_of
from groupwise.planning.sizes import ModelSizes, sizes_of, total_elements
from groupwise.planning.work import Work, work_of

_ADAPTERS = "--model.lora.r 16"


class Plan(NamedTuple):
    """What a run needs of each GPU."""

    cfg: TextRunCfg
    gpu: GPU
    assumed: Assumptions
    sizes: ModelSizes
    work: Work
    memory: Memory
    seconds: dict[str, float]

    @property
    def parameters(self) -> dict[str, int]:
        """Numbers of all parameters, and of those that are trained."""
        return {"all": total_elements([*self.sizes.weights]), "trained": total_elements(self.sizes.trained)}

    @property
    def room(self) -> float:
        """Bytes that tensors may take."""
        return self.assumed.usable * self.gpu.memory

    @property
    def fits(self) -> bool:
        """Whether there is room for the peak, and on a server for the model."""
        served = self.cfg.generation.name != "native"
        return self.memory.peak <= self.room and (not served or self.server_rows > 0)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step. With ``max_staleness`` servers write and load weights during the update."""
        total, generation = sum(self.seconds.values()), self.seconds["generation"]
        how = self.cfg.generation
        if isinstance(how, ServerGenerationCfg) and how.max_staleness and math.isfinite(total):
            return max(generation + self.seconds["publishing"], total - generation)
        return total

    @property
    def tokens(self) -> int:
        """Tokens that all ranks write in a step."""
        return self.work.ranks * self.work.written

    @property
    def server_rows(self) -> int:
        """Completions that one server writes at once; 0 if the model does not fit on its GPU."""
        element = 4 if self.cfg.model.precision == "float32" else 2
        return rows_at_once(self.sizes, self.work, element, self.assumed.server_memory * self.gpu.memory)

    def report(self) -> dict[str, Any]:
        """All numbers, ready for JSON: bytes and seconds."""
        memory = {**self.memory._asdict(), "peak": self.memory.peak, "room": self.room}
        return {
            "fits": self.fits,
            "gpu": self.gpu._asdict(),
            "parameters": self.parameters,
            "memory_bytes": memory,
            "server_rows": None if self.cfg.generation.name == "native" else self.server_rows,
            "tokens_per_step": self.tokens,
            "step_seconds": _finite(self.step_seconds),
            "seconds": {name: _finite(seconds) for name, seconds in self.seconds.items()},
            "work": self.work._asdict(),
            "assumptions": self.assumed._asdict(),
            "fixes": [] if self.fits else [fix._asdict() for fix in fixes(self)],
        }


def _finite(number: float) -> float | None:
    """The number; None if it is infinite, for which JSON has no word."""
    return number if math.isfinite(number) else None


def plan_run(
    cfg: TextRunCfg,
    gpus: int,
    gpu: GPU,
    prompt: int,
    completion: int | None = None,
    assumed: Assumptions | None = None,
) -> Plan:
    """The plan of a run with one process on each of ``gpus``. Servers, if any, have a further GPU each.

    Args:
        prompt: tokens of a prompt, in the mean.
        completion: tokens of a completion, in the mean. None: as many as it may have.
    """
    sizes, work, assumed = sizes_of(cfg.model), work_of(cfg, gpus, prompt, completion), assumed or Assumptions()
    memory = memory_of(cfg, sizes, work)
    return Plan(cfg, gpu, assumed, sizes, work, memory, seconds_of(cfg, sizes, work, gpu, assumed))


class Fix(NamedTuple):
    """Settings that lower the peak, and the peak that is left."""

    options: list[str]
    peak: float


def fixes(plan: Plan) -> list[Fix]:
    """Changes of one setting with which the run fits. If none but adapters is enough, several that are enough together, too.

    Empty if nothing that is known here makes it fit.
    """
    changes = [*_changes(plan)]
    found = [Fix([change.option], changed.memory.peak) for change in changes if (changed := _with(plan, change)).fits]
    if any(fix.options != [_ADAPTERS] for fix in found):
        return found
    options: list[str] = []
    for change in changes:
        changed = _with(plan, change)
        if changed.memory.peak < plan.memory.peak:
            plan, options = changed, [*options, change.option]
        if plan.fits:
            return [Fix(options, plan.memory.peak), *(fix for fix in found if fix.options != options)]
    return []


class _Change(NamedTuple):
    option: str
    part: str
    """Of the settings; empty: these themselves."""
    values: dict[str, Any]


def _changes(plan: Plan) -> Iterator[_Change]:
    """What saves memory, first what costs least."""
    cfg, work = plan.cfg, plan.work
    if work.micro_batch > work.row:
        option = f"--algorithm.micro-batch-size {work.row}"
        yield _Change(option, "algorithm", {"micro_batch_size": work.row})
    if cfg.model.precision == "float32":
        yield _Change("--model.precision bfloat16", "model", {"precision": "bfloat16"})
    if not cfg.model.gradient_checkpointing:
        yield _Change("--model.gradient-checkpointing", "model", {"gradient_checkpointing": True})
    if work.ranks > 1 and not work.sharded and cfg.model.quantization == "none":
        yield _Change("--engine fsdp", "", {"engine": "fsdp"})
    if cfg.generation.name == "native" and not cfg.sampling.has_filters:
        yield _Change("--generation server", "", {"generation": ServerGenerationCfg()})
    if work.ranks > 1 and not cfg.cpu_offload:  # beside the engine above
        yield _Change("--cpu-offload", "", {"cpu_offload": True})
    if cfg.model.lora is None:
        yield _Change(_ADAPTERS, "model", {"lora": LoRACfg()})


def _with(plan: Plan, change: _Change) -> Plan:
    """The plan with other settings."""
    cfg, values = plan.cfg, change.values
    if change.part:
        values = {change.part: getattr(cfg, change.part).model_copy(update=values)}
    changed = cfg.model_copy(update=values)
    return plan_run(changed, plan.work.ranks, plan.gpu, plan.work.prompt, plan.work.completion, plan.assumed)
