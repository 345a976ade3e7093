"""Measurements of snack_cupy beside what it competes with; see README.md in this folder."""
