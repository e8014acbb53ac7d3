"""Pure decisions: no socket, no clock, no environment; time and chance come in as arguments."""
