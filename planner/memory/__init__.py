"""Memory: what a schedule takes of a device, and how it is fitted to a budget."""
