"""Several ops of a layer in one launch, where no gradient is needed; `Kernels` has the compositions they stand for."""
