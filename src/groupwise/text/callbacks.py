"""Callbacks of text runs: check the sampler against the trainer, and log groups."""

import logging
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from tensordict import TensorDict

from groupwise import files
from groupwise.config.run import SamplerMismatchCfg
from groupwise.errors import SamplerMismatchError
from groupwise.text.collector import TextCollector
from groupwise.text.transcripts import Transcript
from groupwise.training.base import Callback
from groupwise.training.evaluation import EvaluationResult

if TYPE_CHECKING:
    from groupwise.training.trainer import Trainer

log = logging.getLogger(__name__)


class CheckSamplerMismatch(Callback):
    """Warns and then stops the run when the KL between sampler and trainer is too large."""

    def __init__(self, cfg: SamplerMismatchCfg) -> None:
        self.cfg = cfg
        self._warned = False

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Check the KL of this iteration's first minibatch."""
        self.check(metrics, trainer.iteration)

    def check(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Warn once, or raise a ``SamplerMismatchError``."""
        found = metrics.get("rollout/sampler_kl", 0.0)
        differ = f"sampler and trainer differ: KL {found:.3g} nats per token in iteration {iteration}, more than"
        if self.cfg.stop is not None and found > self.cfg.stop:
            raise SamplerMismatchError(
                f"{differ} sampler_mismatch.stop={self.cfg.stop:g}; fix: another precision, "
                "objective.importance_sampling_correction, or sampler_mismatch.stop=null"
            )
        if found > self.cfg.warn and not self._warned:
            self._warned = True
            log.warning("%s sampler_mismatch.warn=%g", differ, self.cfg.warn)


class LogGroups(Callback):
    """Logs some groups of the last rollout at each evaluation: completions and rewards in ``<steps>.parquet``."""

    def __init__(self, folder: Path, collector: TextCollector, num_groups: int) -> None:
        self.folder = folder
        self.collector = collector
        self.num_groups = num_groups

    def on_evaluation_end(self, trainer: "Trainer", evaluation: EvaluationResult) -> None:
        """Write them."""
        import pyarrow
        import pyarrow.parquet

        names = self.collector.rewards.names
        rows = [_record(member, names) for member in self.collector.members if member.group < self.num_groups]
        table = BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
        path = self.folder / f"{trainer.env_steps:012d}.parquet"
        with files.warning_if_unwritable(path):
            self.folder.mkdir(exist_ok=True)
            files.write(path, table.getvalue())


def _record(member: Transcript, names: tuple[str, ...]) -> dict[str, object]:
    prompt = member.prompt.example.prompt
    return {
        "group": member.group,
        "prompt": prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt),
        "completion": member.text,
        "reward": member.reward,
        **{f"reward_{name}": part for name, part in zip(names, member.parts, strict=True)},
        "tokens": member.written,
        "turns": member.turns,
        "ended_by": member.stop,
        "greedy": member.greedy,
        "mean_log_prob": sum(member.log_probs) / max(member.written, 1),
    }
