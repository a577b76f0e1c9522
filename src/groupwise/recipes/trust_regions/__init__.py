"""Trust regions other than PPO's clip, and policy gradients without one."""
