"""What a worker's agent costs."""
