"""Eight workers need one adapter at the same moment: the bytes that its source sends, and the time until all load."""
