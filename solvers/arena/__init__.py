"""Schedules and addresses together: the fastest schedule whose buffers fit an arena, with one bound."""
