"""Ray Train on Shoal's workers: an unmodified script with a `TorchTrainer`, `launcher: ray_train` in the spec.

    rank 0        runs the script; `trainer.fit()` sends the training function to the others, and trains with them
    other ranks   wait for the function, and run it; they never run the script

So the script's own lines run once, as the driver of Ray Train runs them, and what `ray.train` offers within the
function is answered here. No actor of Ray Train is started.
"""
