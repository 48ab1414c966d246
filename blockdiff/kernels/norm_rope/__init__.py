"""The norms, and norm_rope: RMSNorm over a head followed by the rotary embedding."""
