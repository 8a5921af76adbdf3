"""Scripts that anyone can run; what needs an H200 is in `benchmarks.h200`."""
