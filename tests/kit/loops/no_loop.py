"""A program without a loop for Shoal."""

print("nothing to do")
