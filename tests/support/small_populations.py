"""A small population on CartPole, and whether two of them are the same."""

import json
import shutil
from contextlib import contextmanager, nullcontext

import pytest
from run_folders import same_weights

import groupwise as gw
from groupwise.evolution.population import answered
from groupwise.plugins import pickled

PPO = {"name": "ppo", "num_steps": 16, "num_epochs": 1, "minibatch_size": 64}
SEARCH = {"algorithm.learning_rate": {"min": 1e-4, "max": 1e-1, "log": True}, "algorithm.num_epochs": [1, 2]}
TINY = {"num_envs": 4, "evaluation": {"interval": 10_000, "episodes": 1}, "episodes": 2}
SMALL = {**TINY, "search": SEARCH, "population": 3, "rounds": 2, "round_steps": 128, "weight_noise": 0.1}


class InThisProcess:
    """A pool that plays each round at once; starting processes takes most of the time of so small a population."""

    def __init__(self, launch, count, given, output):
        self.size, self.busy, self.payload, self.found = count, {}, pickled(given), {}

    def begin(self, task):
        self.found[task.folder] = answered(pickled(task), self.payload, ())
        return task.folder

    def answers(self):
        return [(folder, self.found.pop(folder)) for folder in list(self.busy)]

    def close(self):
        pass


@contextmanager
def in_this_process():
    """Members play here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("groupwise.evolution.population.start_pool", InThisProcess)
        yield


def evolve(path, workers=None, env="CartPole-v1", algorithm=PPO, **options):
    """A small population, in this process or in workers."""
    with in_this_process() if workers is None else nullcontext():
        return gw.evolve(env, algorithm, run_dir=path, workers=workers, **SMALL | options)


def after_first_round(path):
    """The population as it was then: its clones begin when it is resumed."""
    shutil.rmtree(path / "best")
    tree = json.loads(state(path))
    tree["round"] = 1
    for member in tree["members"]:
        member["results"].pop("1", None)
        if member["born"] == 1:
            shutil.rmtree(path / "members" / member["name"])
    (path / "population.json").write_text(json.dumps(tree))
    return path


def everything(path):
    """All that is in a folder, and when it was written."""
    return sorted((str(file), file.lstat().st_mtime_ns) for file in path.rglob("*"))


def state(path):
    return (path / "population.json").read_text(encoding="utf-8")


def check_same(path, other):
    """Scores, settings and lineage of two populations, and the weights of their best members."""
    assert state(path) == state(other)
    assert same_weights(path / "best", other / "best")
