"""The contract: the spec, the messages between supervisor and workers, the layout, and pure functions of them.

Imported by every package; `checks/` decides whether a spec can be accepted. `language_model`, `hugging_face` and
`encoders` have the settings of the models that Shoal's own tasks train. It imports only the standard library and
pydantic (an import contract enforces this), so the service needs no torch.
"""
