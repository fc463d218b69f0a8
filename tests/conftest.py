"""What all tests share."""

from hypothesis import HealthCheck, settings

# The same examples on every run, and no clock: the machine may be busy.
settings.register_profile("project", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")
