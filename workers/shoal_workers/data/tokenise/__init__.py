"""From documents to tokens: in this process, or in processes of its own on all cores. Called by `prepare`.

Inside: `encoding` (one document), `processes` and `child` (many documents in parallel, in their order), `cores`.
"""
