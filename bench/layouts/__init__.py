"""What layouts cost on this machine, and how well the planner predicts it. `main.py` is the command.

Called by `make bench-layouts` and `make bench`.
It never writes documentation: tools/layouts_page.py does so from its JSON.
"""
