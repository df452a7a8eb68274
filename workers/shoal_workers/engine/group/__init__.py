"""The process group of a generation: rendezvous, meshes, network interface, the fence, and waking a blocked thread.

Called by the engine, which owns the group, and by the rooms above through `Meshes` and `GenerationFence`. Never knows
what is trained.
"""
