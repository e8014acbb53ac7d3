"""Code of all three services: settings, logs, keys, HTTP server, tokenizer, KV events, the CLI and the local fleet."""
