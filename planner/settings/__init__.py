"""Settings: what a user may say, read and checked once. Never imports torch."""
