"""`python -m lorafleet`, where the console script is not on the path."""

from lorafleet.cli.main import main

main()
