"""The data plane: sends each request to the replica where its adapter and its prompt's KV cache are hot."""
