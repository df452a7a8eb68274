"""Webhooks as a spec and the settings name them: receiver, events, reference of a secret.

Imported by `contract/spec.py` and by the service, which delivers (`shoal_service/control/webhooks.py`). Pure data, and
never a secret itself.
"""
