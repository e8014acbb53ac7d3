"""What the three houses share: settings, logging, keys, server start, chat tokens, the CLI and the local fleet."""
