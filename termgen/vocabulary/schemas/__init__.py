"""JSON schemas of answers."""
