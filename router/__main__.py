"""`python -m router`."""

from lorafleet.service.process import lean_imports

with lean_imports():
    from router.app import main

main()
