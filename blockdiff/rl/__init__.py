"""Reinforcement learning: prompts, rewards, batches of rollouts, and the objective of a policy."""
