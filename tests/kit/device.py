"""The device that the ranks of tests/dist train on, and their plain reference: the environment names it."""

import os

DEVICE = os.environ.get("SHOAL_TEST_DEVICE", "cpu")
""" "cuda" (`make test-gpu`): all ranks train on the first GPU, with NCCL. A GPU draws other random numbers than a CPU,
so the reference uses the same device."""
ON_GPU = DEVICE == "cuda"
