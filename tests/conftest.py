"""What holds for every test."""

from hypothesis import settings

# How long an example takes depends on who else uses the machine, and is no property of the code.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
