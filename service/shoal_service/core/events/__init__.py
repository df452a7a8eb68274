"""The events of a job's history: a typed class per event type, with severity and words; `catalogue` has them all.
The attempt machine, the supervisor and the store make them; REST, CLI, page and docs/reference/events.md show them.
Nothing here decides, stores or sends anything. (The inputs of the attempt machine are in core/attempt/events.py.)
"""
