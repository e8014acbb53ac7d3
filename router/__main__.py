"""`python -m router`."""

from lorafleet.service.lean_start import lean_imports

with lean_imports():
    from router.app import main

main()
