"""What services say of themselves: log lines, request lines, and metrics that cost little to count."""
