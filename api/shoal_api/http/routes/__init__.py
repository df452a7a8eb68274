"""The routes, a file per topic: jobs, histories, specs, nodes, operations, pages.
Each has `routes(context)`, which app.py calls and includes.
A route reads its parameters, calls the store or a service function, and answers; it holds no logic of its own.
"""
