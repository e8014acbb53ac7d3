"""Programs that use a fleet, or make something for one."""
