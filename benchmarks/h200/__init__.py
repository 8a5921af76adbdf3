"""What is measured on one H200: see `python -m benchmarks.h200 --help` and docs/measuring.md."""
