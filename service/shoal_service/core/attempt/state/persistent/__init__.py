"""Persistent collections: each change makes a new one that shares all but one leaf with the one before.

A thousand workers that leave a group in one turn are a thousand small changes. With tuples and dicts each of them would
copy all workers. Pure; `state` is made of them, and the journal compares them leaf by leaf.
"""
