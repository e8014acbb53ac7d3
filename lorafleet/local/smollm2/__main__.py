"""`python -P -m lorafleet.local.smollm2 DIR`."""

from lorafleet.local.smollm2 import main

main()
