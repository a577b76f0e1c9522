"""Short runs on texts whose rollouts a server writes ahead."""

import threading

from text_runs import copying, train

import groupwise as gw

PROMPTS = 2
ITERATIONS = 4
DECOUPLED = {"old_log_prob": "recomputed", "importance_sampling_correction": "tis"}
SHORT = {
    "num_prompts": PROMPTS,
    "total_steps": None,
    "total_iterations": ITERATIONS,
    "evaluation": {"interval": 10_000, "prompts": 1, "num_logged_groups": 0},
    "sampler_mismatch": {"warn": 10, "stop": None},
}


def run(model, path, double, staleness, *, callbacks=(), task=None, retries=0, **more):
    cfg = gw.GRPOCfg(group_size=4, learning_rate=1e-2, objective=DECOUPLED)
    generation = {"name": "server", "urls": [double.url], "timeout": 20, "retries": retries, "max_staleness": staleness}
    generation |= {"weights_dir": str(path.parent / "weights"), "in_flight_updates": double.in_flight}
    return train(task or copying(), model, path, cfg, generation=generation, callbacks=list(callbacks), **SHORT | more)


def assert_nothing_runs():
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("groupwise", "ThreadPool"))]
