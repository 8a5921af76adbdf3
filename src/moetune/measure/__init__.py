"""The only layer that imports torch or Triton."""
