"""The operations on NVIDIA GPUs, in Triton. docs/gpu.md says how kernels are written here."""
