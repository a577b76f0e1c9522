"""Trust regions besides PPO's clip, and policy gradients without one."""
