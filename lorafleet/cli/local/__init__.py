"""Commands about this machine: a fleet or one service that runs here, its logs, and files that are written or sent.

They may import `lorafleet.local`, and the settings of the services for their help.
"""
