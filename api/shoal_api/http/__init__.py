"""The REST API: `create_app`, routes by topic, streams, problem documents, OpenAPI, and two pages for people (static/).
Called by `shoal serve` (shoal_api/serve.py), tests and benchmarks; it calls the store and shoal_service.
It never decides about jobs and uses neither Ray nor SQL; only this package imports FastAPI.
"""
