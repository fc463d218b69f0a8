"""Transfers between devices and to the host, over streams or threads."""
