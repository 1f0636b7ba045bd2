"""The native kernels on small shapes: `PYTHONPATH=. compute-sanitizer python tests/sanitize.py`."""

import torch
from native_cases import SMALL_CASES

for case in SMALL_CASES:
    case()
torch.cuda.synchronize()
print(f"{len(SMALL_CASES)} cases ran")
