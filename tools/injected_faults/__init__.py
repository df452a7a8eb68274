"""Small faults in the product's source, and which tests catch them: `tools/inject_faults.py` is the program.

    sources     the modules that faults are drawn over, their statements, and a copy of the tree
    changes     every small change that a module's source allows, and a seeded draw among them
    reach       which tests reach which statement, measured in a copy of the tree with a probe before each statement
    trials      one fault in a copy of the tree, and the tests that reach it
    table       the page of the results
    plugins     parts of pytest processes that `reach` and `trials` start

Nothing in here writes into the tree, except `build/`.
"""
