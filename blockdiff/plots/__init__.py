"""Pictures of the files that a run writes: loss curves and denoising pages. Reads records, never a model."""
