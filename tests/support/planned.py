"""Settings and sizes that tests of planning share: the tiny Llama of ``tiny_models``, whose numbers fit on paper.

Width 32, MLP 48, 2 layers, 4 heads of 8 with 2 for keys and values, 40 tokens. Weights of a layer: 32 * 32 for queries, 16 *
32 for keys, as many for values, 32 * 32 behind, and 3 * 32 * 48 in the MLP: 7,680. Head and embeddings: 40 * 32 = 1,280
each. Five norms of 32. So 18,080 parameters.
"""

import torch
from tiny_models import tiny_model

from groupwise import config
from groupwise.planning.gpus import GPU, Assumptions
from groupwise.planning.plan import plan_run

BODY, HEAD, NORMS = 2 * 7680, 1280, 160
ROUND = GPU("round numbers", 1e9, 1000.0, 100.0, 500.0, 50.0, "made up")
"""bfloat16 computes 1,000 operations a second, float32 100; memory has 500 bytes a second, links 50."""
WHOLE = Assumptions(usable=1, mfu=1, bandwidth=1, launch=0, disk=10, server_memory=1)


def save_config(folder, family="llama"):
    with torch.device("meta"):
        tiny_model(family).config.save_pretrained(folder)
    return folder


def settings(folder, algorithm=None, **fields):
    """A run of 2 prompts a rank, each with 4 completions of at most 6 tokens."""
    model = {"path": str(folder)} | fields.pop("model", {})
    sampling = {"max_new_tokens": 6} | fields.pop("sampling", {})
    given = {"num_prompts": 2, "task": {"data": "none.jsonl"}} | fields
    return config.resolve_text({"group_size": 4} | (algorithm or {}), model=model, sampling=sampling, **given)


def planned(cfg, gpus=1, prompt=10, completion=None, gpu=ROUND, assumed=WHOLE):
    return plan_run(cfg, gpus, gpu, prompt, completion, assumed)
