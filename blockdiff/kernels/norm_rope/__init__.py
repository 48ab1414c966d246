"""rms_norm and norm_rope: RMSNorm, and RMSNorm over a head followed by the rotary embedding."""
