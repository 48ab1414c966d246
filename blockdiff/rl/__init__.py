"""Reinforcement learning: rollouts by the engine over the weights that train, rewards, and the gradient of policies."""
