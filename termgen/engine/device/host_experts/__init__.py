"""Experts of a mixture that do not fit on a GPU: computed by the CPU, out of main memory.

    host_list    matrices of a layer's experts in main memory, in blocks for the CPU's kernels
    placement    which of them have a copy on the GPU: those that are used most
    host_call    one call of a CPU's kernel as part of a GPU's stream, so that a recording holds it
    split_ops    the layers' arithmetic: a token's experts here and there at once, and their sum

A step stays one recorded launch: rows go to main memory, a native program computes their experts
there, and its result comes back, while the GPU computes those it has. No Python runs within a step.
"""
