"""Shards that the libraries themselves have written, so that no test needs the libraries.

`files/` was made by `write.py` (run by hand, with mosaicml-streaming 0.13.0, litdata 0.2.76 and datasets 5.2.0) and is
never edited; `samples.py` has the samples that went into it, for the writer and for the tests.
"""
