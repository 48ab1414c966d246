"""The choice of experts: route, and routed_tokens from the tokens on."""
