"""Layers that guess further tokens for a model, from what it made of the last ones.

Each is a `drafting.head_drafts.Head`. They share the embedding of their target, and most its head.
"""
