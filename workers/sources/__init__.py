"""Sources of adapters, one class per scheme: local folders, https, Hugging Face hubs, object stores, plugins."""
