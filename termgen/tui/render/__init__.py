"""Pure renderers of the dashboard: view state in, rows of `(text, role)` out. No Textual."""
