"""Text -> token shards on local disk -> memory-mapped samples.

sources.py     which files a TextDataConfig names, in which order
documents.py   their text, document by document, from any position on
tokenizer.py   bytes, or a tokenizers JSON file
shards.py      one run of documents -> one durable, checksummed file of tokens
index.py       what lies in each shard; the corpus as a whole
prepare.py     once per node: lock, resume, verify, repair
dataset.py     samples of seq_len + 1 tokens over the shards of a split
bar.py         the same preparation with a progress bar, for a terminal
"""
