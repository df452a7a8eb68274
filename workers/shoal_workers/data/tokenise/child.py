"""A process that encodes the documents that another one sends to it. Started by `processes`, never by people.

It ends when its standard input ends, so also when the other process is killed: the kernel closes the pipe then.
"""

from __future__ import annotations

import json
import os
import pickle
import sys

from shoal_workers.data.tokenise.encoding import DocumentEncoder
from shoal_workers.data.tokenizer import load_tokenizer

_NICENESS = 5
"""A third of the share of a training process: other jobs of the node train on the same cores."""


def main(settings: str) -> None:
    """`settings`: JSON with tokenizer and validation_fraction. Both pipes belong to the process that started this one,
    so what comes through them is its own."""
    os.nice(_NICENESS)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    given = json.loads(settings)
    tokenizer = load_tokenizer(given["tokenizer"])
    encoder = DocumentEncoder(tokenizer, given["validation_fraction"])
    try:
        pickle.dump(tokenizer.fingerprint, answers)
        answers.flush()
        while True:
            documents = pickle.load(requests)
            pickle.dump([encoder.encode(document) for document in documents], answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
    except (EOFError, BrokenPipeError):
        os._exit(0)  # nothing is left to flush, and nobody to answer to
