"""What happens now, for a terminal: the fleet, the panel of one job, the stacks of its ranks. Pure, as the other pages.
Called by `top`, `watch`, `submit --follow`, `stacks`, `incidents` and the demo.
Nothing here sends a request or keeps a state.
"""
