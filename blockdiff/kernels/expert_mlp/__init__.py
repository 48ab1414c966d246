"""expert_mlp: the routed experts of a mixture-of-experts layer, grouped by expert."""
