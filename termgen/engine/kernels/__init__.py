"""Triton kernels of the CUDA path: one op a file, its launcher and its torch reference together.

Nothing outside this package imports triton, and whoever uses a kernel imports its module where the
path is chosen, so that a machine without triton loads everything else.

A launcher waits for nothing and takes its lengths from device memory. Counts that change from step
to step never choose a compiled variant (`do_not_specialize`): what a launcher can compile is
settled by the model, so running each launcher once per model compiles everything.
"""
