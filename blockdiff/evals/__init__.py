"""How well a model does a task, one file per task: accuracy and denoising steps per canvas together."""
