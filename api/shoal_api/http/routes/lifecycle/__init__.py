"""Routes that let a job go on in place: to more steps, or after a failure.

`create_app` includes them. They decide nothing: the store does.
"""
