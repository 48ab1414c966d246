"""Layers: small modules with weights that call kernels; nothing here knows about caches, batches or training."""
