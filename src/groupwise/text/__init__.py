"""Everything that only language models need: policy, generation, rollout, rewards, data, tools."""
