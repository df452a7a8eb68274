"""What the doors for programs cost: a script and a loop under Shoal beside the same script under torchrun."""
