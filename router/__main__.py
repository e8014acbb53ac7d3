"""`python -m router`."""

from router.app import main

main()
