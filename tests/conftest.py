"""Settings that every test shares."""

import torch
from hypothesis import settings

torch.set_num_threads(1)

# compile and import times would trip a deadline on a busy machine; the seed is fixed so that a red run repeats
settings.register_profile("groupwise", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("groupwise")
