"""A user's package that happens to be called `workers`."""
