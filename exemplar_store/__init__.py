"""Kernels with measured speedups in performance buckets, in Redis."""
