"""The console in a real Chromium, in front of a fleet of sim workers with tenants, a rollout and a failure."""
