"""Token ids of a prompt, exactly as the engine will compute them: chat templates, and caches before the tokenizer.

A wrong id would give another block hash, so every cache falls back to the tokenizer. Imports no other package of
`lorafleet`.
"""
