"""Benchmarks: the default cache against hf_paged, interleaved in one process, medians and ratios."""
