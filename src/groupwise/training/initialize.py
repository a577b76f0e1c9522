"""First weights of a policy, from the checkpoint of another one."""

from pathlib import Path
from typing import NamedTuple

from groupwise.errors import CheckpointError
from groupwise.policies.base import Policy
from groupwise.report.folder import RunFolder
from groupwise.training.checkpoint import MANIFEST, load_checkpoint


class Initialized(NamedTuple):
    """How a policy got its first weights."""

    folder: Path
    """The checkpoint."""
    taken: int
    """Tensors that were taken over."""
    fresh: tuple[str, ...]
    """Modules that the checkpoint lacks, and that keep their own first weights."""
    unused: tuple[str, ...]
    """Modules of the checkpoint that the policy lacks."""

    def __str__(self) -> str:
        parts = [f"Weights: {self.taken} tensors from {self.folder}"]
        parts += [f"{', '.join(self.fresh)} starts fresh"] if self.fresh else []
        parts += [f"its {', '.join(self.unused)} is not used"] if self.unused else []
        return f"{'; '.join(parts)}."


def initialize(policy: Policy, source: Path) -> Initialized:
    """Give a policy the weights of another one, except those of its ``value_modules`` that the other lacks.

    Args:
        source: a run folder (its latest checkpoint), or a checkpoint.

    Raises:
        RunFolderError: there is no run.
        CheckpointError: there is no checkpoint, or its policy differs (names the tensors).
    """
    is_checkpoint = source.parent.name == "checkpoints" or (source / MANIFEST).is_file()
    folder = source if is_checkpoint else RunFolder.open(source).latest
    weights, own = load_checkpoint(folder, policy=policy).policy, policy.state_dict()
    absent, unused = own.keys() - weights.keys(), weights.keys() - own.keys()
    differing = [name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape]
    of_values = {name for name in absent | unused if name.partition(".")[0] in policy.value_modules}
    for names, what in (
        (absent - of_values, "lacks"),
        (unused - of_values, "has, which the policy lacks,"),
        (differing, "has in another shape"),
    ):
        if names:
            raise CheckpointError(
                f"policy.init_from: {folder} {what} {', '.join(sorted(names))}; fix: the settings of the policy that it was "
                "trained with"
            )
    policy.load_state_dict({**own, **{name: weights[name] for name in own.keys() & weights.keys()}})
    fresh, left = (tuple(sorted({name.partition(".")[0] for name in names})) for names in (absent, unused))
    return Initialized(folder, len(own) - len(absent), fresh, left)
