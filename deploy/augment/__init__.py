"""Stage 1's data augmentation: teachers write kernels, the evaluator decides, what it accepts is kept.

Invariants: whatever was answered or judged is on disk before anything follows from it, so that a kill at any moment
loses nothing accepted and repeats nothing finished; a kernel is kept only by an evaluation of this run's own evaluator.
"""
