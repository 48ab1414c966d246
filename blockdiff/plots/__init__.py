"""Pictures of what a run wrote: loss curves and denoising pages. Reads records, never a model."""
