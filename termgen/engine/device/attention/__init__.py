"""Paged attention. Read `reference.py` first: what a backend computes, in plain torch. Then
`base.py`, the interface, and `triton_paged.py`, what a GPU runs; `registry.py` chooses.
"""
