"""Environment of the test processes: no hub, a private cache, Triton's interpreter where there is no GPU."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel file is imported

torch.manual_seed(0)
