"""A training script, where the module of a task is expected: it reads its arguments when it is imported."""

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, required=True)
epochs = parser.parse_args([]).epochs
