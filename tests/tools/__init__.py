"""Programs about the tests, run by hand: none of them is a test."""
