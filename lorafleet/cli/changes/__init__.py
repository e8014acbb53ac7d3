"""Commands that show changes before they are made: a plan, a record from a file or another fleet, a file to apply.

`record` asks for consent and makes the changes for `import`, `sync` and `apply`.
"""
