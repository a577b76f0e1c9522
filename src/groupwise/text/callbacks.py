"""Logs groups of text runs."""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise import files
from groupwise.text.collector import TextCollector
from groupwise.text.transcripts import Transcript
from groupwise.training.base import Callback
from groupwise.training.evaluation import EvaluationResult

if TYPE_CHECKING:
    from groupwise.training.trainer import Trainer


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
