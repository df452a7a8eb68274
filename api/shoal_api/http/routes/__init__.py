"""The routes, a file per topic: jobs, their histories, tables and artifacts, specs, operations, pages.

A route reads its parameters, calls the store or a service function, and answers; it holds no logic of its own.
"""
