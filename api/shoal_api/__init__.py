"""What people and programs use: the REST edge (`http`), the `shoal` command (`cli`), the Python client, the demo.

Called by the console script `shoal` and by users' programs (`shoal_api.client`); imports shoal_service.
Never imports torch; only `serve.py` starts a server and a Ray cluster. Decisions about jobs are made in shoal_service.
"""
