"""An eager runtime."""
