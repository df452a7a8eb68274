"""What failures cost: Shoal, Ray Train V2 elastic and torchrun on the same work. `main.py` is the command."""
