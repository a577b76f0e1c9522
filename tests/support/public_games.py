"""Public games by name."""

from groupwise.config.run import TextTaskCfg
from groupwise.text.envs import TextEnvs
from groupwise.text.task import Start
from groupwise.text.tool_env import make_text_env


def game(name, **settings):
    return make_text_env(TextTaskCfg(env=name, env_kwargs=settings))


def parted(make, kept, turns, starts=5):
    """Groups whose members, stepped in turns, were not alike."""
    envs, apart = TextEnvs(make, "seed", kept), 0
    for start in (Start(seed) for seed in range(starts)):
        members, _ = envs.open(start, 3)
        apart += any(len({repr(m.step(turn)) for m in members if m.ending is None}) > 1 for turn in turns)
    envs.close()
    return apart
