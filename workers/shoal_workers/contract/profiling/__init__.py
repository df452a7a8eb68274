"""Profiles of a running job: what is requested of a worker, and what it reports.

Imported by the engine, which takes them, and by the service, which passes requests on and keeps the results. Pure data:
the standard library and pydantic only.
"""
