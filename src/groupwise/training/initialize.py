"""First weights of a policy, from the checkpoint of another one."""

from pathlib import Path

from groupwise.errors import CheckpointError
from groupwise.policies.base import Policy
from groupwise.report.folder import RunFolder
from groupwise.training.checkpoint import MANIFEST, load_checkpoint, load_policy


def initialize(policy: Policy, source: Path) -> str:
    """Give a policy the weights of another one, but not where one lacks ``value_modules`` of the other; says what was done.

    Args:
        source: a run folder (its latest checkpoint), or a checkpoint.

    Raises:
        RunFolderError: there is no run.
        CheckpointError: there is no checkpoint, or its policy differs (names the tensors).
    """
    is_checkpoint = source.parent.name == "checkpoints" or (source / MANIFEST).is_file()
    folder = source if is_checkpoint else RunFolder.open(source).latest
    weights, own = load_checkpoint(folder, policy=policy).policy, policy.state_dict()
    of_values = {name for name in own.keys() ^ weights.keys() if name.partition(".")[0] in policy.value_modules}
    absent, unused = of_values - weights.keys(), of_values - own.keys()
    taken = {name: weight for name, weight in weights.items() if name not in unused}
    try:
        load_policy(policy, taken | {name: own[name] for name in absent}, folder)
    except CheckpointError as error:
        raise CheckpointError(f"policy.init_from: {error}") from error
    parts = [f"Weights: {len(taken)} tensors from {folder}"]
    for names, what in ((absent, "{} starts fresh"), (unused, "its {} is not used")):
        if names:
            parts.append(what.format(", ".join(sorted({name.partition(".")[0] for name in names}))))
    return f"{'; '.join(parts)}."
