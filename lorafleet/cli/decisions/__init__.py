"""Commands about single requests: `explain`, `decisions`, `request`, `requests` and `top`.

`explanations` lays out what the router answered, for these commands and for the screen of `top`; it is pure.
"""
