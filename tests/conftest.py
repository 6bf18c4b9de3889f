"""Without a CUDA device Triton's kernels run in its interpreter, which must be said before Triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
