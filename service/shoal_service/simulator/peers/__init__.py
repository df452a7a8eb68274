"""Other schedulers as policies, to compare with: `registry` has their names, the other modules one family each.

`shoal simulate`, bench/schedule and the tests call them through the engine. They know nodes of one kind and workers of
one CPU; none of them knows projects, and only `first_come` priorities. The service never uses them.
"""
