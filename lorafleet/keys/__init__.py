"""Keys: who calls, by which key, with which scopes; key files, and the key of a service of its own."""
