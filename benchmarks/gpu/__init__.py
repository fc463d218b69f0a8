"""What a GPU has to show: ``make gpu`` (``docs/gpu.md``)."""
