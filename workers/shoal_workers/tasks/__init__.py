"""The built-in tasks: a language model on text, and causal language models of Hugging Face's `transformers`.

Loaded by the engine by name, like a user's own task; the engine calls `balance` directly. Never imports the engine:
layouts are applied to these models from outside.
"""
